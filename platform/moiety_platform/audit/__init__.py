"""Audit log: an append-only log of every administrative change, chained by hashes (docs/commands.md)."""
