"""Endpoint picker of the Gateway API Inference Extension: it chooses a gateway for each request of an Envoy proxy."""
