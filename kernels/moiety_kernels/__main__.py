"""Entry point of `python -m moiety_kernels`, the kernel commands without the `moiety` command.

A machine lent for a measurement, for example, has torch and Triton but neither our other packages nor a network.
"""

from moiety_kernels.cli import standalone

standalone()
