"""Benchmarks behind `moiety bench`: the engine's offline throughput, and the scheduler's decision time."""
