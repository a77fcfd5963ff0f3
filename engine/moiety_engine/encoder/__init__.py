"""Encoder models (BERT, RoBERTa): embeddings, scores of text pairs and classes, without a KV cache."""
