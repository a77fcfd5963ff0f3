"""Simulator that runs the real scheduler and block pool under virtual time with a device model.

Step times come from `devices`, arrivals from `moiety_workload`; the scheduling decisions are the engine's. Uses no
tensors, no sockets and no wall clock.
"""
