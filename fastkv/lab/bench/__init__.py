"""`fastkv bench`: speed and memory of the full cache and of compressed ones, side by side on the device there is."""
