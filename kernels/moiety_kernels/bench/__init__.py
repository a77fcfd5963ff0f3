"""`moiety bench kernels`: the kernels against their rivals, and against what memory and arithmetic allow."""
