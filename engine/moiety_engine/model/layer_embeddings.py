"""Embeddings of tokens for each layer (Gemma 4 E2B, E4B): their computation at the model's input, and their addition.

T tokens, D model width, P width of a layer's embedding, A the embeddings of all layers, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from moiety_kernels.embedding import embedding
from moiety_kernels.linear import linear
from moiety_kernels.output_gate import output_gate
from moiety_kernels.rms_norm import rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.layer_embedding_weights import AddedEmbeddingWeights, LayerEmbeddingWeights
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.weights import ModelWeights


class LayerEmbeddings:
    """Computation of the embeddings of all layers."""

    def __init__(self, spec: ModelSpec, weights: LayerEmbeddingWeights, arithmetic: Arithmetic) -> None:
        assert spec.layer_embeddings is not None
        self._spec, self._weights = spec.layer_embeddings, weights
        self._linear = partial(linear, invariant=arithmetic.invariant)
        # The projection is divided by the root of the model's width, which the norm undoes but for its epsilon.
        self._eps = spec.norm.eps * spec.hidden_size

    def __call__(self, token_ids_T: Tensor, x_TD: Tensor) -> Tensor:
        """Return the embeddings, [layers, T, P], of tokens with the model's embeddings `x_TD`."""
        spec, weights = self._spec, self._weights
        projected_TLP = self._linear(x_TD, weights.projection_AD).view(len(x_TD), -1, spec.width)
        normed_TLP = rms_norm(projected_TLP, weights.norm_P, self._eps)
        table_TA = embedding(token_ids_T, weights.table_VA, x_TD.dtype, spec.table_factor)
        summed_TLP = (normed_TLP + table_TA.view_as(normed_TLP)) * spec.factor
        return summed_TLP.transpose(0, 1).contiguous()


class AddedEmbedding:
    """Addition of a layer's embedding to the layer's output, which is then multiplied by the layer's factor."""

    def __init__(
        self, weights: AddedEmbeddingWeights, scale_1: Tensor | None, eps: float, arithmetic: Arithmetic
    ) -> None:
        """Create the addition.

        `scale_1`: learned factor of the layer's output, if it has one. `eps`: of the model's norms.
        """
        self._weights, self._scale_1, self._eps = weights, scale_1, eps
        self._linear = partial(linear, invariant=arithmetic.invariant)

    def __call__(self, x_TD: Tensor, fed_TD: Tensor, embedding_TP: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two terms of the layer's output: its usual output, and what the embedding adds.

        `x_TD` and `fed_TD` are the terms of the usual output; `embedding_TP` is overwritten.
        """
        weights = self._weights
        x_TD = x_TD + fed_TD
        gate_TP = self._linear(x_TD, weights.gate_PD)
        gated_TP = output_gate(embedding_TP.unsqueeze(1), gate_TP, "gelu_tanh").squeeze(1)
        added_TD = rms_norm(self._linear(gated_TP, weights.projection_DP), weights.post_norm_D, self._eps)
        if self._scale_1 is None:
            return x_TD, added_TD
        scale_1 = self._scale_1.to(x_TD.dtype)
        return x_TD * scale_1, added_TD * scale_1


def layer_embeddings(
    spec: ModelSpec, weights: ModelWeights, arithmetic: Arithmetic
) -> tuple[LayerEmbeddings | None, list[AddedEmbedding]]:
    """Return the computation of the embeddings of all layers, and their addition in each layer.

    These are None and an empty list for a model without them.
    """
    if weights.layer_embeddings is None:
        return None, []
    of_layers = [(layer.embedding, layer.scale_1) for layer in weights.layers]
    added = [AddedEmbedding(own, scale_1, spec.norm.eps, arithmetic) for own, scale_1 in of_layers if own is not None]
    assert len(added) == len(of_layers), "all layers have an embedding, or none"
    return LayerEmbeddings(spec, weights.layer_embeddings, arithmetic), added
