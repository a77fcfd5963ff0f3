"""External servers behind the gateway: each installed and started, and the checks themselves."""
