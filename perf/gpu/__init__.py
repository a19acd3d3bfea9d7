"""Single operations on a GPU: correctness, then timings beside their peers."""
