"""Enforcement of thought budgets: the tokens that end a model's reasoning when its budget is used.

At the last position of the budget no token may end the reasoning, and at the next positions the closing tokens are the
only choice. Where the reasoning can begin again, its stretches share the budget, and no further one may begin when it
is used. What happens at a position follows from the output before the previous token alone. So it is the same with
overlapping steps, which do not know the previous token yet, after a preemption, on another engine, and for drafts.
"""

from __future__ import annotations

from typing import NamedTuple

from moiety_engine.sampling.rows import Row
from moiety_engine.thought_scan import MAX_SPACE_TOKENS
from moiety_wire.thought_budget import MIN_THOUGHT_BUDGET


class ThoughtLimit(NamedTuple):
    """Restriction of one token: the only one allowed, or else those that are banned."""

    forced: int | None = None
    banned: tuple[int, ...] = ()


_FREE = ThoughtLimit()


def limits_thoughts(row: Row) -> bool:
    """Return whether the row's budget restricts its next token."""
    return row.request.submit.thought_budget is not None and thought_limit(row) != _FREE


def thought_limit(row: Row) -> ThoughtLimit:
    """Return how the row's budget restricts its next token."""
    budget = row.request.submit.thought_budget
    if budget is None:
        return _FREE
    position = row.num_output
    if not budget.reopener_ids:  # its one stretch begins at the start
        num_beyond = position - len(budget.opener_ids) - budget.max_tokens
        if not -1 <= num_beyond < len(budget.closing_ids) + MAX_SPACE_TOKENS:
            return _FREE
    scan = row.thought_scan
    if scan is None or scan.start is None:
        return _FREE
    most = max(budget.max_tokens - scan.num_before, MIN_THOUGHT_BUDGET)
    num_beyond = position - scan.start - most
    num_free = most - 1 if num_beyond >= 0 else most - 2  # tokens of the stretch that must not have closed it
    if scan.end is not None and scan.end < scan.start + num_free:
        return ThoughtLimit(banned=scan.banned())
    if 0 <= num_beyond < len(budget.closing_ids):
        return ThoughtLimit(budget.closing_ids[num_beyond])
    return ThoughtLimit(banned=budget.closer_ids if num_beyond == -1 else scan.banned())
