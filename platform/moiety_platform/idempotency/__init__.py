"""Answers kept under a request's `Idempotency-Key`: a request that is repeated is answered, not served again."""
