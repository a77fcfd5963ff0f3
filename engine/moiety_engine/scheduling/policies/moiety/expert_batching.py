"""Choice of decodes that use the same experts, among those whose order the deadlines leave open.

An MoE step reads the weights of every expert that any of its tokens is routed to, so requests that use the same experts
cost less together. The routing of a token is not known in advance; the experts of the request's previous token predict
it. Experts are bits of an integer: one for each expert of each layer. This module knows neither deadlines nor tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_PASSED_OVER = 4  # steps in a row in which a request may lose its turn to one with a later deadline
ROUNDS = 4  # choices are made in so many rounds at most, each with the experts of the rounds before


def union_of(experts: Iterable[int]) -> int:
    """Return the experts that any of the requests is predicted to use."""
    union = 0
    for one in experts:
        union |= one
    return union


def choose_by_experts(used: int, candidates: Sequence[int], count: int) -> list[int]:
    """Return the indices of `count` candidates that add few experts to those in `used`, in ascending order.

    A candidate without a prediction, 0, comes first, since its experts are learned only when it decodes. Among equals
    the earlier candidate comes first. O(ROUNDS · n) unions in the number of candidates.
    """
    chosen = [place for place, one in enumerate(candidates) if not one][:count]
    left = [place for place, one in enumerate(candidates) if one]
    a_round = max(1, -(-(count - len(chosen)) // ROUNDS))
    while len(chosen) < count:
        sizes = {place: (used | candidates[place]).bit_count() for place in left}
        left.sort(key=sizes.__getitem__)
        num_taken = min(a_round, count - len(chosen))
        taken, left = left[:num_taken], sorted(left[num_taken:])
        used |= union_of([candidates[place] for place in taken])
        chosen += taken
    return sorted(chosen)
