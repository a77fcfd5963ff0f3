"""Prices of tokens by model and class, kept in the store and edited by administrators."""
