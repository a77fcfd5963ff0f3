"""Which replica serves a request: the connected engines, and a pure choice among them."""
