"""Anthropic's Messages API on the shared inference pipeline: fields, answers and errors."""
