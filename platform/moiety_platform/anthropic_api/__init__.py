"""Anthropic's Messages API over the same pipeline: its fields, its words and its errors."""
