"""Scenarios of `benchmarks/scheduling.py`: what each offers, measures and requires. Run that script instead."""
