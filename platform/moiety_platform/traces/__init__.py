"""Traces: one a request, its phases as cheap numbers, and spans of those that are kept. Never a prompt or key."""
