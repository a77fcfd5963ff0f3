"""Traces: one per request, its phases as cheap numbers, and spans of the kept ones.

They never contain a prompt or key.
"""
