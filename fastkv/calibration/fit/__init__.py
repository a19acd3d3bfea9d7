"""`fastkv calibrate`: a stock model runs over text, and what is fitted to it goes into a file."""
