"""Supervision of the processes of one machine: start them together, restart them when they end, drain them at the end.

The package knows processes, ports and the data directory; of a part (engine, gateway, …) it knows only the command
line. It imports nothing heavy, because it runs while the parts import their dependencies.
"""
