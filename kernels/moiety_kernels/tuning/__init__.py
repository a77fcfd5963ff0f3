"""Tuned choices for this machine's GPU, kept on disk; without one, an operation uses its cost model.

`choices` defines the file and its contents; `tuner` fills it. A tunable operation has a module `tuning` with `TUNABLE`,
and calls `choices.tuned` before its cost model.
"""
