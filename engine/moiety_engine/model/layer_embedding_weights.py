"""Weights of the embeddings of tokens for each layer (Gemma 4 E2B, E4B).

D model width, P width of a layer's embedding, A the embeddings of all layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.tensor_allocator import TensorAllocator


@dataclass(frozen=True, slots=True)
class LayerEmbeddingWeights:
    """Weights at the model's input."""

    table_VA: Tensor
    projection_AD: Tensor  # of the model's embedding of the token
    norm_P: Tensor  # float32


@dataclass(frozen=True, slots=True)
class AddedEmbeddingWeights:
    """Weights of one layer."""

    gate_PD: Tensor
    projection_DP: Tensor
    post_norm_D: Tensor  # float32


def allocate_table(spec: ModelSpec, new: TensorAllocator) -> LayerEmbeddingWeights | None:
    """Return the uninitialized weights at the model's input; None if no layer adds embeddings."""
    own = spec.layer_embeddings
    if own is None:
        return None
    width = len(spec.layers) * own.width
    table_VA, projection_AD = new.matrix(own.vocab_size, width), new.matrix(width, spec.hidden_size)
    return LayerEmbeddingWeights(table_VA, projection_AD, new.vector(own.width))


def allocate_added(spec: ModelSpec, new: TensorAllocator) -> AddedEmbeddingWeights:
    """Return the uninitialized weights of one layer."""
    assert spec.layer_embeddings is not None
    width, size = spec.layer_embeddings.width, spec.hidden_size
    return AddedEmbeddingWeights(new.matrix(width, size), new.matrix(size, width), new.vector(size))
