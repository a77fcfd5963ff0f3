"""Core process of the engine: the step loop and its connection to the engine server."""
