"""Speculative prefill of conversations' next turns on idle engines."""
