"""Benchmarks of a running gateway from its clients' view. Knows HTTP and traces, but not the gateway's code."""
