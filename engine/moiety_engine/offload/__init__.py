"""Expert offloading: all experts in host memory or in a file, and a cache of hot experts on the device.

This package handles tensors with one expert per row of their first dimension; it knows no model, checkpoint or request.

E experts of a layer, S slots of it, T tokens, K experts a token.
"""
