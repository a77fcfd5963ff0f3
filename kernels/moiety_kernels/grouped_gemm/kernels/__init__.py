"""The Triton kernels of the grouped products, one module per kernel with its launch code."""
