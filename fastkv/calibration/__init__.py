"""Fitting what `fastkv.fits` stores: run a stock model over text, offline, and write a file for later runs."""
