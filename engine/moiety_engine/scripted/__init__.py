"""A core that answers from a script, without model and torch, for tests and for benchmarks of the code around it."""
