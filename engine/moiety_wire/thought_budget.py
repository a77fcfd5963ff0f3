"""Marks and budgets of the reasoning (thoughts) at the start of an output."""

from __future__ import annotations

import msgspec

MIN_THOUGHT_BUDGET = 2  # tokens; an engine decides about a token before it knows the previous one


class ThoughtMarks(msgspec.Struct, frozen=True):
    """Marks around the reasoning at the start of an output. `is_open`: the prompt already contains the opening mark.

    `answer_opener` may follow the reasoning, and is not part of the answer.
    """

    opener: str
    closer: str
    is_open: bool
    answer_opener: str = ""


class ThoughtBudget(msgspec.Struct, frozen=True, array_like=True):
    """Limit on the reasoning at the start of an output, for engines whose card has `controls_reasoning`.

    The reasoning begins after `opener_ids`, if the output begins with these, and ends with any token of `closer_ids`.
    After `max_tokens` tokens (at least MIN_THOUGHT_BUDGET) without one, the output goes on with `closing_ids`, and then
    as the model likes. Tokens of `space_ids` may stand before the opener. With `reopener_ids` the reasoning can begin
    again, and all its stretches together have `max_tokens` tokens, where each counts at least as many as the opener
    has. The first of these ids then begins a message's header. The opener is a channel's token, the channel's name and
    the token that ends a header; a header with the channel and name, and anything around them, begins the reasoning.
    """

    max_tokens: int
    opener_ids: tuple[int, ...]  # empty if the prompt has opened the reasoning
    closer_ids: tuple[int, ...]
    closing_ids: tuple[int, ...]
    space_ids: tuple[int, ...] = ()
    reopener_ids: tuple[int, ...] = ()
