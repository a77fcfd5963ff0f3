"""Embeddings of tokens for each layer (Gemma 3n and Gemma 4 E2B, E4B), as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerEmbeddingSpec:
    """Table of a token's embeddings for every layer, and what is added to them.

    A layer's embedding has `width` values: the table's row times `table_factor`, plus the normalized projection of the
    model's embedding of the token, the sum times `factor`. A layer multiplies it by a gate of its own and adds a
    projection of the product to its output.
    """

    vocab_size: int
    width: int
    table_factor: float
    factor: float = 2.0**-0.5
