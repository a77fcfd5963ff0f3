"""The page of tenants: the list, and for one tenant its usage, limits, keys and settings."""
