"""Single operators and single layers under pytest-benchmark: `pytest perf/micro`."""
