"""`moiety bench engine`: offline throughput of the engine in this process."""
