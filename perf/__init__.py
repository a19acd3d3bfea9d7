"""Measurements: resource checks without a GPU (`perf.aot`), timings with one."""
