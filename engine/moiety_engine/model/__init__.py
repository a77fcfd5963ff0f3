"""The decoder: what a checkpoint says it is (spec), its tensors (weights), and the forward pass. Knows no request."""
