"""Execution of step plans on the device, and the sizing of the KV cache."""
