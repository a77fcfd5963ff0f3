"""Deletion of a tenant's data. Usage is kept as numbers under the same ids, and every sum still agrees."""
