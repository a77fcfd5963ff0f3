"""Encoder models (BERT): embeddings, scores of text pairs and classes, without a KV cache."""
