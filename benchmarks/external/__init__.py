"""Servers of others before which the gateway is checked: each installed and started, and the checks themselves."""
