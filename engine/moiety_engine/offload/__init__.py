"""Experts that live in host memory or in a file, and a cache of hot ones on the device. Knows tensors with an expert in
each row of their first dimension; knows no model, checkpoint or request.

E experts of a layer, S slots of it, T tokens, K experts a token.
"""
