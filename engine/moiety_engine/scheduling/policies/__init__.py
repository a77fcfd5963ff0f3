"""Scheduling policies: their interface, the policies, and the registry that makes them by name."""
