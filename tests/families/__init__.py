"""Which model types work: tiny random models of every type, and what is checked of each."""
