"""The backend of a CPU.

`operations` has the functions of `reference` that a CPU can do faster. What no operator of torch does well is C++,
which `compiled` builds. Nothing here is imported until an operation runs on a CPU.
"""
