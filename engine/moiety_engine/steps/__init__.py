"""Sampled steps, for the traces of the requests that run in them."""
