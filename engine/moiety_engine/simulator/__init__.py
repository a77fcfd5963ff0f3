"""The real scheduler and block pool under virtual time, with a model of the device in place of the device.

What a step costs comes from `devices`, what arrives from `moiety_workload`; the decisions are the engine's own. Knows
no tensor, no socket and no wall clock.
"""
