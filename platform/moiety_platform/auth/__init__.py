"""Authentication: API keys, OIDC tokens, and the guard of the admin API."""
