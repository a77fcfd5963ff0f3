"""Kernels that an operation is made of beside its own."""
