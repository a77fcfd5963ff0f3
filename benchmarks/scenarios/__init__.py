"""Scenarios of `benchmarks/scheduling.py`, each with its load, measurements and targets. Run that script instead."""
