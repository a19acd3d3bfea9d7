"""What is fitted to one model and stored in files: the formats, which the core reads; `fit_*` write them, offline."""
