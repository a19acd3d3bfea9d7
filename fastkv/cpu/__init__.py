"""The backend of a CPU.

`operations` has the functions of `reference` that a CPU can do faster; `codes` compiles codes.cpp, for slots of 8 and 4
bits. Modules are imported on first use.
"""
