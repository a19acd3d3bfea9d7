"""Every policy on a real model: facts in real text, at equal bytes, from one reading of each text."""
