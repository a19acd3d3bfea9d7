"""Measurements of speed, of quality and of the compiled kernels; each room is a command with --help."""
