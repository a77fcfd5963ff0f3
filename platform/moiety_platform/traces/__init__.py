"""Spans: one trace a request, from the client's context to the engine. Never a prompt or a key in them."""
