"""Tenants and their projects: service class and fair-share weight of each customer."""
