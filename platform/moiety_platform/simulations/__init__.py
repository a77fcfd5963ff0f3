"""Simulations of the last hour's traffic under other settings, by the engine's simulator in a separate process."""
