"""Compiled Triton kernels executed without a GPU: PTX of sm_80 in numpy, with checks of memory and of order.

parse.py         PTX text into instructions
instructions.py  what each instruction does, for all threads of a program at once
memory.py        global and shared memory, and what may not be done with them
program.py       one program: where its threads are, its barriers and copies
launch.py        the programs of a launch in a drawn order; races between them
orders.py        launches whose programs share memory, which must give the same bits in any order
driver.py        a driver for Triton, so that launchers launch as they do on a GPU
docs/ptx.md      what is checked and what cannot be; harness.py and plugin.py make fastkv's tests use it
"""
