"""Tables of the rotary embedding's cosines and sines, extended for longer contexts. P positions, R rotated pairs."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moiety_engine.model.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)
from moiety_kernels.rope.inputs import RotaryInputs

if TYPE_CHECKING:
    from moiety_engine.model.attention_options import QueryGrowth
    from moiety_engine.model.batch import Batch
    from moiety_engine.model.spec import ModelSpec


class RotaryTable:
    """Cosine and sine tables of one RopeSpec on one device, float32."""

    # Tables of the newest batch with images, and its `rows_I`, which identify it: all layers use the same tables.
    _mixed: tuple[Tensor, RotaryInputs] | None = None

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self._frequencies_R, self._magnitude = inverse_frequencies(spec)
        self.device = device
        self._axis_R = None if spec.axes is None else torch.tensor(spec.axis_of_pair, device=device)
        self._cos_PR = torch.empty(0, len(self._frequencies_R), device=device)
        self._sin_PR = self._cos_PR
        self._kept: list[Tensor] = []  # recorded programs read the tables by address

    def upto(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return (cos_PR, sin_PR) with P ≥ num_positions."""
        if num_positions > self._cos_PR.shape[0]:
            size = max(2048, 1 << (num_positions - 1).bit_length())
            angles_PR = torch.arange(size, dtype=torch.float32)[:, None] * self._frequencies_R
            self._cos_PR = (angles_PR.cos() * self._magnitude).to(self.device)
            self._sin_PR = (angles_PR.sin() * self._magnitude).to(self.device)
            self._kept += [self._cos_PR, self._sin_PR]
        return self._cos_PR, self._sin_PR

    def of_batch(self, batch: Batch) -> RotaryInputs:
        """Return the tables and rows of a batch's tokens.

        An image's token turns each pair by the position on the pair's axis, so a batch with images has a row for each
        of its tokens.
        """
        cos_PR, sin_PR = self.upto(batch.max_context)
        images = batch.images
        if images is None or self._axis_R is None:
            return RotaryInputs(cos_PR, sin_PR, batch.positions_T)
        if self._mixed is None or self._mixed[0] is not images.rows_I:
            at_IR = images.positions_3I.index_select(0, self._axis_R).T
            pair_R = torch.arange(len(self._axis_R), device=self.device)
            tables = [table_PR.index_select(0, batch.positions_T) for table_PR in (cos_PR, sin_PR)]
            for table_TR, table_PR in zip(tables, (cos_PR, sin_PR), strict=True):
                table_TR.index_copy_(0, images.rows_I, table_PR[at_IR, pair_R])
            row_T = torch.arange(len(batch.positions_T), device=self.device)
            self._mixed = images.rows_I, RotaryInputs(tables[0], tables[1], row_T)
        return self._mixed[1]


class GrowthTable:
    """Factor of queries at each position, float32."""

    def __init__(self, spec: QueryGrowth, device: torch.device) -> None:
        self._spec, self.device = spec, device
        self._factor_P = torch.empty(0, device=device)
        self._kept: list[Tensor] = []  # recorded programs read the factors by address

    def upto(self, num_positions: int) -> Tensor:
        """Return factor_P with P ≥ num_positions."""
        if num_positions > self._factor_P.shape[0]:
            position_P = torch.arange(max(2048, 1 << (num_positions - 1).bit_length()), dtype=torch.float64)
            steps_P = torch.floor((position_P + self._spec.first) / self._spec.original_max_positions)
            self._factor_P = (1 + self._spec.beta * torch.log1p(steps_P)).float().to(self.device)
            self._kept.append(self._factor_P)
        return self._factor_P


def rotation_of(spec: ModelSpec) -> str:
    """Return a digest of the rotary frequencies of all layers."""
    digest = hashlib.blake2b(digest_size=16)
    for rope in spec.ropes:
        frequencies_R, magnitude = inverse_frequencies(rope)
        digest.update(frequencies_R.numpy().tobytes() + struct.pack("<d?", magnitude, rope.interleaved))
        digest.update(struct.pack("<3q", *rope.axes) if rope.axes else b"")
    return digest.hexdigest()


def inverse_frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    """Return (radians per position for each rotated pair, factor of cosines and sines).

    The order of operations is that of transformers: at 100,000 positions the last bit of a frequency changes the third
    digit. A rotary width of 0 has one pair that never turns, since the kernels rotate at least one pair.
    """
    if not spec.rotary_width:
        return torch.zeros(1), 1.0
    exponent_R = torch.arange(0, spec.rotary_width, 2, dtype=torch.float32) / spec.rotary_width
    plain_R = 1.0 / (spec.theta**exponent_R)
    match spec.scaling:
        case None:
            return plain_R, 1.0
        case LinearScaling() | ProportionalScaling() as scaling:
            return _divided(plain_R, scaling), 1.0
        case Llama3Scaling() as scaling:
            return _llama3(plain_R, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(plain_R, exponent_R, spec, scaling), scaling.attention_factor
        case LongRopeScaling(factors=factors):
            return 1.0 / (torch.tensor(factors.of_pairs) * spec.theta**exponent_R), factors.attention_factor


def _divided(plain_R: Tensor, scaling: LinearScaling | ProportionalScaling) -> Tensor:
    divided_R = plain_R / scaling.factor
    if isinstance(scaling, LinearScaling):
        return divided_R
    return divided_R.where(torch.arange(len(plain_R)) < scaling.num_pairs, 0.0)


def _llama3(plain_R: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Blend from 1/factor at long wavelengths to 1 at short ones, linearly in the turns within the old context."""
    turns_R = scaling.original_max_positions / (2 * math.pi / plain_R)
    kept_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_R = kept_R.clamp(0, 1)
    return (1 - kept_R) * plain_R / scaling.factor + kept_R * plain_R


def _yarn(plain_R: Tensor, exponent_R: Tensor, spec: RopeSpec, scaling: YarnScaling) -> Tensor:
    """Keep the frequency of pairs that turn often in the old context, and lower that of pairs that turn rarely."""

    def pair_that_turns(turns: float) -> float:
        span = scaling.original_max_positions / (turns * 2 * math.pi)
        return spec.rotary_width * math.log(span) / (2 * math.log(spec.theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_width - 1)
    if low == high:
        high += 0.001
    kept_R = 1 - ((torch.arange(len(plain_R), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    slowed_R = 1.0 / (scaling.factor * spec.theta**exponent_R)
    return slowed_R * (1 - kept_R) + plain_R * kept_R
