"""Weights of an encoder of images. D encoder width, Q learned positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.norm_weights import NormWeights


@dataclass(frozen=True, slots=True)
class LinearWeights:
    weight_OI: Tensor
    bias_O: Tensor  # float32


@dataclass(frozen=True, slots=True)
class VisionLayerWeights:
    attention_norm: NormWeights
    qkv: LinearWeights
    output: LinearWeights
    ffn_norm: NormWeights
    up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class PatchMergerWeights:
    """Weights of the projection of merged patches to the decoder's width."""

    norm: NormWeights  # of each patch, or, for deepstack, of the merged patches
    up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class VisionWeights:
    patch: LinearWeights  # inputs: channel, frame, row, column
    positions_QD: Tensor  # learned positions, row by row of their square
    layers: tuple[VisionLayerWeights, ...]
    merger: PatchMergerWeights
    deepstack: tuple[PatchMergerWeights, ...]
