"""Answers stored under a request's `Idempotency-Key`.

A repeated request gets the stored answer and is not served again.
"""
