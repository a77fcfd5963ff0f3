"""Tool calling: tool definitions for the model, and the calls in its output.

The text of an answer goes into a `CallReader` of the model's `ToolFormat`, which returns content and calls. The package
knows no API and no HTTP.
"""
