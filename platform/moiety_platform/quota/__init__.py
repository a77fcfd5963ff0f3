"""Quotas and rate limits that hold exactly: leases from the store, holds in memory, one settlement (docs/quotas.md)."""
