"""Tools that a model may call: what it is told of them, and the calls in what it writes.

The text of an answer goes into a `CallReader`, of the model's own `ToolFormat`, and comes out as content and calls. It
knows no API and no HTTP.
"""
