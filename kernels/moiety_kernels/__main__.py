"""`python -m moiety_kernels`: the commands about kernels where the `moiety` command is not installed, such as on a
machine lent for a measurement, which has torch and Triton but neither our other packages nor a network."""

from moiety_kernels.cli import standalone

standalone()
