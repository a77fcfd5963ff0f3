"""Decoder models: the spec of a checkpoint, its weights, and the forward pass. Independent of requests."""
