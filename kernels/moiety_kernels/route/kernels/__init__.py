"""Helper kernels of the routing operation."""
