"""Measuring a running gateway from outside, as its clients see it. Knows HTTP and traces, nothing of the gateway."""
