"""Hyper-connections: several residual streams, which each half of a layer reads as a mixture and writes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.hyper_connections import reference
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    from torch import Tensor

MAX_STREAMS = 16

_cpu = lazy_import(__name__, "cpu")


def mixture_weights(
    logits_TC: Tensor, scale: Tensor, base_C: Tensor, num_streams: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (pre_TN, post_TN, comb_TNN) from the projections of the streams; everything is float32.

    With C = 2N + N² columns, those of pre, post and comb, `scale` has a factor for each of the three. With C = N, and
    one factor, there is only pre, and the others are None. `iterations`: times that comb's columns are normalized.
    """
    columns = logits_TC.shape[1]
    require(0 < num_streams <= MAX_STREAMS, f"the number of streams must be in 1 … {MAX_STREAMS}")
    whole = columns != num_streams
    require(not whole or columns == num_streams * (2 + num_streams), f"{columns} columns do not match the streams")
    require_shape("base", base_C, (columns,))
    require_shape("scale", scale, (3 if whole else 1,))
    require(logits_TC.dtype is scale.dtype is base_C.dtype is torch.float32, "mixtures are computed in float32")
    args = logits_TC, scale, base_C, num_streams, iterations, eps
    if logits_TC.is_cpu and _cpu().fits(logits_TC, scale, base_C):
        fast: tuple[Tensor, Tensor | None, Tensor | None] = _cpu().mixture_weights(*args)
        return fast
    return reference.mixture_weights(*args)


def collapse_streams(streams_TND: Tensor, pre_TN: Tensor) -> Tensor:
    """Return x_TD = Σ_n pre[n] · streams[n], summed in float32 in the order of n, in the streams' dtype."""
    require_shape("pre", pre_TN, tuple(streams_TND.shape[:2]))
    if streams_TND.is_cpu and _cpu().fits(streams_TND, pre_TN) and _cpu().fits_width(streams_TND):
        fast: Tensor = _cpu().collapse_streams(streams_TND, pre_TN)
        return fast
    return reference.collapse_streams(streams_TND, pre_TN)


def expand_streams(streams_TND: Tensor, output_TD: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """Return streams_TND after half a layer with this output.

    Stream n is post[n] · output + Σ_j comb[j, n] · streams[j], in the streams' dtype.
    """
    tokens, streams, width = streams_TND.shape
    require_shape("output", output_TD, (tokens, width))
    require_shape("post", post_TN, (tokens, streams))
    require_shape("comb", comb_TNN, (tokens, streams, streams))
    everything = streams_TND, output_TD, post_TN, comb_TNN
    if streams_TND.is_cpu and _cpu().fits(*everything) and _cpu().fits_width(streams_TND):
        fast: Tensor = _cpu().expand_streams(*everything)
        return fast
    return reference.expand_streams(*everything)
