"""Options of closed questions as prompts that end with them: their encoding, and probabilities from their scores.

The prompts of one question are equal up to some token, and only what follows is scored. What they share has the same
probability in each, and cancels out when the probabilities of a question are made to sum to 1.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from moiety_platform.errors import BadRequest
from moiety_platform.inference.generation import Generation
from moiety_platform.inference.model_texts import ModelText

MAX_OPTION_TOKENS = 1 << 20  # prompt tokens of all options of a request, which are in memory and sent to engines
PROMPTS_AT_ONCE = 16  # encoded between two checks of their number of tokens

Entry = TypeVar("Entry")


async def encode_options(text: ModelText, generation: Generation) -> list[list[int]]:
    """Return the token ids of each prompt.

    Raises the errors of `encode`, and BadRequest once the prompts have more than MAX_OPTION_TOKENS tokens together.
    """
    prompts, num_tokens = list[list[int]](), 0
    for first in range(0, len(generation.prompts), PROMPTS_AT_ONCE):
        encoded = await text.encode(generation.prompts[first : first + PROMPTS_AT_ONCE], generation.prompt_field)
        prompts += encoded
        num_tokens += sum(map(len, encoded))
        if num_tokens > MAX_OPTION_TOKENS:
            raise BadRequest(
                f"the input and the questions have {num_tokens:,} tokens with the first {len(prompts):,} of "
                f"{len(generation.prompts):,} options; a request may have {MAX_OPTION_TOKENS:,}. Send fewer questions "
                "in one request, or a shorter input",
                code="too_many_option_tokens",
                param="questions",
            )
        await asyncio.sleep(0)  # others have their turn
    return prompts


def scored_from(prompts: Sequence[list[int]], option_counts: Sequence[int]) -> list[int]:
    """Return for each prompt the index of the first token in which the options of its question differ, at least 1."""
    starts: list[int] = []
    for group in _grouped(prompts, option_counts):
        least, most = min(group), max(group)  # of sorted sequences these two differ first
        differ = (at for at, (one, other) in enumerate(zip(least, most, strict=False)) if one != other)
        starts += [max(1, next(differ, min(len(least), len(most))))] * len(group)
    return starts


def billed_prompt_tokens(prompts: Sequence[list[int]], option_counts: Sequence[int]) -> list[int]:
    """Return how many tokens of each prompt are billed.

    These are all tokens, but of the second and further options of a question only those in which the options differ:
    what they share is billed once.
    """
    billed = [len(prompt) for prompt in prompts]
    starts, number = scored_from(prompts, option_counts), 0
    for count in option_counts:
        for further in range(number + 1, number + count):
            billed[further] -= starts[further]
        number += count
    return billed


def option_probabilities(scores: Sequence[float], option_counts: Sequence[int]) -> list[list[float]]:
    """Return the probabilities of each question's options, which sum to 1, from their log-probabilities."""
    found = []
    for group in _grouped(scores, option_counts):
        largest = max(group)
        powers = [math.exp(score - largest) for score in group]
        total = math.fsum(powers)
        found.append([power / total for power in powers])
    return found


def _grouped(entries: Sequence[Entry], option_counts: Sequence[int]) -> Iterator[list[Entry]]:
    left = iter(entries)
    for count in option_counts:
        yield list(islice(left, count))
