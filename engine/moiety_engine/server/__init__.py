"""Engine server: the process between the gateways and the core, which also handles text. Imports no torch."""
