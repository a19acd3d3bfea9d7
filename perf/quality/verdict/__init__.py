"""What to remember of evicted tokens: fidelity and answers at equal bytes on six geometries of keys."""
