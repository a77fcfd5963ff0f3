"""The ground of the CPU kernels: vector code, raw memory access and the team of threads. Knows no operation.

Operations keep their kernels in `<operation>/cpu.py`. They are compiled by numba once a machine and kept in its cache.
"""
