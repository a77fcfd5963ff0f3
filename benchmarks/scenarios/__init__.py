"""The scenarios of `benchmarks/scheduling.py`: what each offers, measures and asks. Run that script, not these."""
