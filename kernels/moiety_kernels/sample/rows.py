"""What each row of a step asks of its draw. Knows nothing of how it is computed.

L rows, J of them with penalties, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IN_PROMPT = 1 << 30  # in an entry of `seen_JV`, beside the number of times that the token is in the output


@dataclass(frozen=True, slots=True)
class Draws:
    """How a row is drawn; a row of temperature 0 takes its best token. The draw inverts the cumulative distribution at
    `uniform_L`: in the order of the vocabulary, or of the probabilities, the largest first, where a filter is set."""

    temperature_L: Tensor  # float32
    top_k_L: Tensor  # int32, 0 for all
    top_p_L: Tensor  # float64, 1 for all; the best token always stays
    min_p_L: Tensor  # float32, a share of the best token's probability
    uniform_L: Tensor  # float64, in [0, 1)


@dataclass(frozen=True, slots=True)
class Penalties:
    """What lowers the logits of tokens that were seen before."""

    place_L: Tensor  # int32: which of the J a row is, -1 for none
    seen_JV: Tensor  # int32: times in the output, IN_PROMPT or more added where the token is in the prompt
    repetition_J: Tensor  # float32: logits of all tokens seen are divided by it, negative ones multiplied
    presence_J: Tensor  # float32: subtracted once from tokens of the output
    frequency_J: Tensor  # float32: subtracted once for each time in the output
