"""Distributed inference: rank layout, rendezvous, collectives and failure detection. Independent of the model."""
