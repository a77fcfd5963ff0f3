"""One model replica: a front process that speaks to gateways and a core process that runs the step loop.

Importing this package imports no torch; only the core's modules (`model`, `runner`, `sampling`, …) do.
"""
