"""Specification of rotary embeddings (RoPE, Su et al. 2021) and of their scalings to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear scaling: positions are divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1 scaling: low frequencies are divided by a factor, high ones kept, with a smooth transition."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023); `attention_factor` multiplies cosines and sines."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRopeFactors:
    """LongRoPE factors: one for each rotated pair; `attention_factor` multiplies cosines and sines."""

    of_pairs: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): the frequency of each rotated pair is divided by its own factor.

    Contexts longer than `original_max_positions` have different factors from shorter ones. `longest_context` decides
    for the whole model, since keys stay in the KV cache and are shared.
    """

    short: LongRopeFactors
    long: LongRopeFactors
    original_max_positions: int
    longest_context: int

    @property
    def factors(self) -> LongRopeFactors:
        """Factors for the model's longest context."""
        return self.long if self.longest_context > self.original_max_positions else self.short


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Rotation of the first `num_pairs` pairs, at frequencies of the whole width divided by a factor (Gemma 4)."""

    num_pairs: int
    factor: float = 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_width` entries of each head.

    Entries i and i + rotary_width / 2 form a rotated pair; a width of 0 means no rotation (`NO_ROPE`). If
    `interleaved`, the checkpoint has the entries of a pair next to each other, and its rows are reordered at loading.
    `axes`: M-RoPE (Wang et al. 2024): numbers of pairs that turn by the temporal, the vertical and the horizontal
    position of an image's token; see `axis_of_pair`.
    """

    theta: float
    rotary_width: int
    scaling: RopeScaling | None = None
    interleaved: bool = False
    axes: tuple[int, int, int] | None = None

    @property
    def axis_of_pair(self) -> tuple[int, ...]:
        """Axis of each rotated pair: 0 temporal, 1 vertical, 2 horizontal; the axes alternate as in Qwen3-VL."""
        axis = [0] * (self.rotary_width // 2)
        for number, count in enumerate((self.axes or (0, 0, 0))[1:], 1):
            for pair in range(number, min(3 * count, len(axis)), 3):
                axis[pair] = number
        return tuple(axis)


NO_ROPE = RopeSpec(theta=1.0, rotary_width=0)  # attention without positions (NoPE, Kazemnejad et al. 2023)


def without_rotation(width: int) -> RopeSpec:
    """Return a rotary embedding whose angles are all zero: `width` entries of a key that all heads share, unrotated.

    Latent attention without positions keeps that part of its keys (Kimi Linear, arXiv 2510.26692).
    """
    return RopeSpec(theta=1.0, rotary_width=width, scaling=LinearScaling(math.inf))
