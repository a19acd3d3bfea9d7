"""The figures and tables of five papers, repeated on a small pretrained model: `python -m perf.papers`."""
