"""Choices that were timed on this machine's GPU, kept on disk; without one, an operation asks its cost model.

`choices` is the file and what is in it; `tuner` fills it. An operation that can be tuned has a module `tuning` with
`TUNABLE`, and asks `choices.tuned` before its cost model.
"""
