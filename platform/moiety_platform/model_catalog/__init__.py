"""Catalogue of the served models for administrators: features, prices, load, and tenants that may use them."""
