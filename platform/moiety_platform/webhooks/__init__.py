"""Tells other systems what happens here: events as signed HTTP requests, from a queue that all gateways share."""
