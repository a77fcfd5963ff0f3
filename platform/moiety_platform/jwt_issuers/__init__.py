"""Issuers of JWTs: which tokens are accepted for inference instead of an API key, and for which projects."""
