"""Enforcement of thought budgets: the tokens that end a model's reasoning when its budget is used.

At the last position of the budget no token may end the reasoning, and at the next positions the closing tokens are the
only choice. What happens at a position follows from the output before the previous token alone. So it is the same with
overlapping steps, which do not know the previous token yet, after a preemption, on another engine, and for drafts.
"""

from __future__ import annotations

from moiety_engine.sampling.rows import Row


def limits_thoughts(row: Row) -> bool:
    """Return whether the row is at a position at which its budget may restrict the next token."""
    budget = row.request.submit.thought_budget
    return budget is not None and -1 <= _num_beyond(row) < len(budget.closing_ids)


def forced_token(row: Row) -> int | None:
    """Return the closing token that must come next; None where the model is free, apart from `banned_tokens`."""
    budget, num_beyond = row.request.submit.thought_budget, _num_beyond(row)
    if budget is None or not 0 <= num_beyond < len(budget.closing_ids) or not _is_thinking(row, budget.max_tokens - 1):
        return None
    return budget.closing_ids[num_beyond]


def banned_tokens(row: Row) -> tuple[int, ...]:
    """Return the tokens that must not come next, because the closing tokens follow."""
    budget = row.request.submit.thought_budget
    if budget is None or _num_beyond(row) != -1 or not _is_thinking(row, budget.max_tokens - 2):
        return ()
    return budget.closer_ids


def _num_beyond(row: Row) -> int:
    """Return the number of output tokens after the budget; negative before its end. Requires a budget."""
    budget = row.request.submit.thought_budget
    return -2 if budget is None else row.num_output - len(budget.opener_ids) - budget.max_tokens


def _is_thinking(row: Row, num_tokens: int) -> bool:
    """Return whether the output has begun with reasoning that does not end within its first `num_tokens` tokens."""
    budget = row.request.submit.thought_budget
    assert budget is not None, "only a request with a budget has limited reasoning"
    output, begin = row.known_output, len(budget.opener_ids)
    if tuple(output[:begin]) != budget.opener_ids:
        return False
    return not any(token_id in budget.closer_ids for token_id in output[begin : begin + num_tokens])
