"""Scheduling: the choice of requests and tokens for each step. Uses no tensors."""
