"""The Triton kernels of the grouped products, one module a kernel with what launches it."""
