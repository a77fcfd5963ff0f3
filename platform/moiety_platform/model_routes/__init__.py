"""Routing rules of the operator: names that clients send, and the models that answer them."""
