"""Kept traces in the database: what they are found by, and their spans."""
