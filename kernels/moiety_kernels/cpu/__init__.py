"""Base of the CPU kernels: vector code, raw memory access and the thread team. It contains no operation.

Operations keep their kernels in `<operation>/cpu.py`. numba compiles them once per machine and caches them.
"""
