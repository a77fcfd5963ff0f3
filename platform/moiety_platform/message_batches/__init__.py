"""Anthropic's Message Batches over the batches of `/v1/messages`."""
