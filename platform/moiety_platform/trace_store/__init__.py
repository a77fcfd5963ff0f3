"""Kept traces in the database: search index and spans."""
