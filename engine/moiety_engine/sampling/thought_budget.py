"""Enforcement of thought budgets: the tokens that end a model's reasoning when its budget is used.

At the last position of the budget no token may end the reasoning, and at the next positions the closing tokens are the
only choice. Where the reasoning can begin again, its stretches share the budget, and no further one may begin when it
is used. What happens at a position follows from the output before the previous token alone. So it is the same with
overlapping steps, which do not know the previous token yet, after a preemption, on another engine, and for drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moiety_engine.sampling.rows import Row
from moiety_wire.messages import MIN_THOUGHT_BUDGET, ThoughtBudget

MAX_SPACE_TOKENS = 8  # of white space before the reasoning


class ThoughtLimit(NamedTuple):
    """Restriction of one token: the only one allowed, or else those that are banned."""

    forced: int | None = None
    banned: tuple[int, ...] = ()


class _Stretch(NamedTuple):
    """The last stretch of reasoning that the output has begun."""

    start: int  # position of its first token, after the opener
    end: int | None  # position of the token that closes it; None while it is open
    num_before: int  # tokens of the stretches before it


_FREE = ThoughtLimit()


def limits_thoughts(row: Row) -> bool:
    """Return whether the row may be at a position at which its budget restricts the next token."""
    budget = row.request.submit.thought_budget
    if budget is None:
        return False
    num_beyond = row.num_output - len(budget.opener_ids) - budget.max_tokens
    if num_beyond < -1 - budget.max_tokens + MIN_THOUGHT_BUDGET:
        return False
    return bool(budget.reopener_ids) or -1 <= num_beyond < len(budget.closing_ids) + MAX_SPACE_TOKENS


def thought_limit(row: Row) -> ThoughtLimit:
    """Return how the row's budget restricts its next token."""
    budget = row.request.submit.thought_budget
    if budget is None:
        return _FREE
    position = row.num_output
    output = row.known_output[: max(position - 1, 0)]
    stretch = _last_stretch(budget, output)
    if stretch is None:
        return _FREE
    most = max(budget.max_tokens - stretch.num_before, MIN_THOUGHT_BUDGET)
    num_beyond = position - stretch.start - most
    num_free = most - 1 if num_beyond >= 0 else most - 2  # tokens of the stretch that must not have closed it
    if stretch.end is not None and stretch.end < stretch.start + num_free:
        is_used = budget.max_tokens - stretch.num_before - (stretch.end - stretch.start) < MIN_THOUGHT_BUDGET
        return _without_opener(budget, output) if is_used else _FREE
    if 0 <= num_beyond < len(budget.closing_ids):
        return ThoughtLimit(budget.closing_ids[num_beyond])
    if num_beyond == -1:
        return ThoughtLimit(banned=budget.closer_ids)
    return _without_opener(budget, output) if num_beyond > 0 else _FREE


def _without_opener(budget: ThoughtBudget, output: Sequence[int]) -> ThoughtLimit:
    """Ban the second token of the opener where the previous token, which may be unknown, can be the first one."""
    reopener = budget.reopener_ids
    if not reopener or tuple(output[-len(reopener) :]) != reopener:
        return _FREE
    return ThoughtLimit(banned=budget.opener_ids[1:2])


def _last_stretch(budget: ThoughtBudget, output: list[int]) -> _Stretch | None:
    """Return the last stretch of reasoning in the output; None where it begins with none."""
    opener, start, num_before = budget.opener_ids, 0, 0
    again = (*budget.reopener_ids, *opener)
    if opener:
        while start < min(len(output), MAX_SPACE_TOKENS) and output[start] in budget.space_ids:
            start += 1
        if tuple(output[start : start + len(opener)]) == opener:
            start += len(opener)
        else:  # something else may come before the reasoning where it can begin later
            begun = _find(again, output, 0) if budget.reopener_ids else None
            if begun is None:
                return None
            start = begun + len(again)
    while True:
        end = _first_of(budget.closer_ids, output, start)
        begun = None if end is None or not budget.reopener_ids else _find(again, output, end)
        if end is None or begun is None:
            return _Stretch(start, end, num_before)
        num_before += end - start
        start = begun + len(again)


def _first_of(token_ids: Sequence[int], output: list[int], start: int) -> int | None:
    """Return the first position from `start` on that has one of the tokens."""
    end = len(output)
    for token_id in token_ids:
        try:
            end = output.index(token_id, start, end)
        except ValueError:
            continue
    return end if end < len(output) else None


def _find(row: tuple[int, ...], output: list[int], start: int) -> int | None:
    """Return the first position from `start` on at which these tokens stand in a row."""
    while True:
        try:
            start = output.index(row[0], start)
        except ValueError:
            return None
        if tuple(output[start : start + len(row)]) == row:
            return start
        start += 1
