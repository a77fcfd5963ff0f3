"""Hyper-connections of the residual stream: several streams, which each half of a layer reads as a mixture.

T tokens, N streams, D model width, J = N · D.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from moiety_engine.model.norms import make_norm
from moiety_kernels.hyper_connections import collapse_streams, expand_streams, mixture_weights
from moiety_kernels.linear import linear
from moiety_kernels.rms_norm import rms_norm

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.compressed_specs import StreamsSpec
    from moiety_engine.model.compressed_weights import StreamsWeights
    from moiety_engine.model.norm_weights import NormWeights
    from moiety_engine.model.norms import Norm
    from moiety_engine.model.spec import ModelSpec, NormSpec
    from moiety_engine.model.weights import ModelWeights


class OutputMixtures:
    """Weights, post_TN and comb_TNN, that add the output of half a layer to the streams, by these streams.

    All norms of a model share them: a norm adds them when it forms the half's input, and the norm after it, which adds
    the half's output, takes them. Micro-batches have several streams at a time.
    """

    def __init__(self) -> None:
        self._of_streams: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakTensorKeyDictionary()

    def keep(self, streams_TND: Tensor, weights: tuple[Tensor, Tensor]) -> None:
        """Keep the weights until the output of the half that reads these streams is added."""
        self._of_streams[streams_TND] = weights

    def take(self, streams_TND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights that were kept for these streams, and forget them."""
        return self._of_streams.pop(streams_TND)


class StreamNorm:
    """Norm of the mixture of residual streams that half a layer, or the head, reads: a `Norm` of streams_TND."""

    def __init__(
        self,
        norm: Norm,
        spec: StreamsSpec,
        weights: StreamsWeights,
        eps: float,
        arithmetic: Arithmetic,
        outputs: OutputMixtures,
    ) -> None:
        """Create the norm. `eps`: of the streams' own normalization. `outputs`: shared by the norms of a model."""
        self._norm, self._spec, self._weights, self._eps, self._outputs = norm, spec, weights, eps, outputs
        self._linear = partial(linear, invariant=arithmetic.invariant)
        self._unit_J = torch.ones(weights.projection_CJ.shape[1], device=weights.base_C.device)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the normalized mixture, [T, D], of the streams, [T, N, D]."""
        x_TND, weights, spec = x_TD, self._weights, self._spec
        flat_TJ = rms_norm(x_TND.flatten(1).float(), self._unit_J, self._eps)
        logits_TC = self._linear(flat_TJ, weights.projection_CJ)
        pre_TN, post_TN, comb_TNN = mixture_weights(
            logits_TC, weights.scale, weights.base_C, spec.num_streams, spec.iterations, spec.eps
        )
        if post_TN is not None and comb_TNN is not None:
            self._outputs.keep(x_TND, (post_TN, comb_TNN))
        return self._norm(collapse_streams(x_TND, pre_TN))

    def after_adding(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the streams, [T, N, D], with the output of the half before, and their normalized mixture."""
        streams_TND = expand_streams(x_TD, delta_TD, *self._outputs.take(x_TD))
        return streams_TND, self(streams_TND)


def residual_norms(
    spec: ModelSpec, weights: ModelWeights, arithmetic: Arithmetic
) -> tuple[list[tuple[Norm, Norm]], Norm]:
    """Return the norms of the inputs of both halves of each layer, and the final norm."""
    outputs = OutputMixtures()

    def norm(of_layer: NormWeights | None, streams: StreamsWeights | None, form: NormSpec = spec.norm) -> Norm:
        own = make_norm(form, of_layer, arithmetic)
        if spec.streams is None or streams is None:
            return own
        return StreamNorm(own, spec.streams, streams, spec.norm.eps, arithmetic, outputs)

    layers = [(norm(w.attention_norm, w.attention_streams), norm(w.ffn_norm, w.ffn_streams)) for w in weights.layers]
    final_eps = spec.norm.final_eps
    last = spec.norm if final_eps is None else replace(spec.norm, eps=final_eps)
    return layers, norm(weights.final_norm, weights.streams, last)


def split_streams(x_TD: Tensor, spec: StreamsSpec | None) -> Tensor:
    """Return the residual stream of these embeddings: streams_TND, all the same at first, if there are several.

    Streams, which a pipeline stage or an MTP layer begins with, are returned unchanged.
    """
    return x_TD if spec is None or x_TD.dim() > 2 else x_TD.unsqueeze(1).expand(-1, spec.num_streams, -1).contiguous()


def residual_shape(tokens: int, spec: ModelSpec) -> tuple[int, ...]:
    """Return the shape of the residual stream of this number of tokens: [T, D], or [T, N, D] with several streams."""
    streams = () if spec.streams is None else (spec.streams.num_streams,)
    return tokens, *streams, spec.hidden_size
