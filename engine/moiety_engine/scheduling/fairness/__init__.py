"""Fairness among tenants: virtual token counters, and queues that serve the tenant furthest behind."""
