"""vLLM's public tests of its HTTP API against a gateway of Moiety. Has none of vLLM's code: it reads an archive."""
