"""Which tokens of which requests run in the next step. Never touches a tensor."""
