"""Parts of the Triton kernel of attention's input."""
