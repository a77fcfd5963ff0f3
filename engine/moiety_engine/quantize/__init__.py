"""Checkpoint quantization, and measurement of its effect on quality."""
