"""Building blocks of the Triton kernels of linear attention."""
