"""The two products of an expert layer on a GPU, over rows grouped by expert: their tiles and kernels.

`moiety_kernels.moe.experts` is the operation that uses them.
"""
