"""Policies of tenants for keys that their developers make."""
