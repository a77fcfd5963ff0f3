"""The page of tenants: the list, and of one tenant its usage, limits, keys and settings."""
