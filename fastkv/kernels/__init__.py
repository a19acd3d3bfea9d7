"""Triton kernels, one operation a file, each with a twin of the same name in `fastkv.reference`.

A launcher is beside its kernel; `operations` is the backend that they make. Device functions are shared through
`_attention` (dot products, softmax, partials, where the slots of a head are) and `_evicted` (what is known of evicted
tokens), what launchers need through `_launch`. Nothing here is imported until an operation runs on a GPU, or on the CPU
under Triton's interpreter. Every kernel reads lengths on the device, never synchronises with the host and writes every
element of its outputs.
"""
