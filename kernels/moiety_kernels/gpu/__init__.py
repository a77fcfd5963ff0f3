"""Shared parts of the Triton kernels: cross-compilation for GPUs that are not present, and known GPU speeds.

On a machine without Triton nothing here is imported unless requested: operations import their `kernel.py` with the
first CUDA tensor.
"""
