"""Routing of requests: the connected engines, and a pure choice among them."""
