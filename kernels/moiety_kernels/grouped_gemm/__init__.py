"""The two products of an expert layer on a GPU, over rows grouped by expert: how they are tiled, and their kernels.

`moiety_kernels.moe.experts` is the operation that uses them.
"""
