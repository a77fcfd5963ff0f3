"""What the Triton kernels share: compiling them for GPUs that are not here, and what is known of a GPU's speeds.

Nothing here is imported on a machine without Triton unless asked for: the operations import their `kernel.py` when the
first CUDA tensor comes.
"""
