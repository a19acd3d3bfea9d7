"""Triton kernels, one operation a file, each with a twin of the same name in `fastkv.reference`.

`operations` is the backend they make. Nothing here is imported until an operation runs on a GPU, or on the CPU
under Triton's interpreter. Every kernel reads lengths on the device, never synchronises with the host and writes every
element of its outputs.
"""
