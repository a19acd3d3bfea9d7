"""Which cache to choose: answers, next tokens and fidelity at equal bytes on seven geometries of keys."""
