"""Webhooks: events as signed HTTP requests, from a queue that all gateways share."""
