"""Speed and memory of whole models: the full cache, fastkv and kvpress."""
