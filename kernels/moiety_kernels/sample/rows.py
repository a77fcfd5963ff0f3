"""Sampling parameters of each row of a step, as data without an implementation.

L rows, J of them with penalties, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IN_PROMPT = 1 << 30  # flag in an entry of `seen_JV`, added to the token's number of occurrences in the output


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters per row; a row of temperature 0 takes its best token.

    The draw inverts the cumulative distribution at `uniform_L`: in the order of the vocabulary, or, where a filter is
    set, in descending order of probability.
    """

    temperature_L: Tensor  # float32
    top_k_L: Tensor  # int32, 0 for all
    top_p_L: Tensor  # float64, 1 for all; the best token always stays
    min_p_L: Tensor  # float32, a share of the best token's probability
    uniform_L: Tensor  # float64, in [0, 1)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties that lower the logits of tokens seen before."""

    place_L: Tensor  # int32: the row's index among the J, -1 for none
    seen_JV: Tensor  # int32: occurrences in the output, plus IN_PROMPT where the token is in the prompt
    repetition_J: Tensor  # float32: logits of all tokens seen are divided by it, negative ones multiplied
    presence_J: Tensor  # float32: subtracted once from tokens of the output
    frequency_J: Tensor  # float32: subtracted once per occurrence in the output
