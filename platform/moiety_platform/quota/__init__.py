"""Limits that hold exactly: leases from the store, holds from memory, settlement once (docs/quotas.md)."""
