"""`moiety bench kernels`: the kernels against rival implementations and against the memory and compute roofline."""
