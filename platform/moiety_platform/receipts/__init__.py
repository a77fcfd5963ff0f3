"""Signed receipts of requests, in one hash chain for each tenant."""
