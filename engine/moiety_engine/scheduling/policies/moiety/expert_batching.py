"""Choice of decodes that use the same experts, among those whose order the deadlines leave open.

An MoE step reads the weights of every expert that any of its tokens is routed to, so requests that use the same experts
cost less together. The routing of a token is not known in advance; the experts of the request's previous token predict
it. Experts are bits of an integer: one for each expert of each layer. Tenants whose requests use experts that few other
requests use would get fewer turns; `TenantTurns` bounds how far they fall behind. This module knows neither deadlines
nor tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

MAX_PASSED_OVER = 4  # steps in a row in which a request may lose its turn to one with a later deadline
MAX_BEHIND = 16.0  # turns by which a tenant may be behind its share before it gets those of its deadlines again
ROUNDS = 4  # after the first choice, others are made in so many rounds at most, each with the experts of those before


class TenantTurns:
    """Turns by which tenants are behind their shares, while requests are chosen by their experts."""

    def __init__(self) -> None:
        self._behind: dict[str, float] = {}

    def is_behind(self, tenant_id: str) -> bool:
        """Return whether the tenant's requests get the turns that their deadlines give them."""
        return self._behind.get(tenant_id, 0.0) >= MAX_BEHIND

    def count_step(self, waiting: Iterable[str], taken: Iterable[str]) -> None:
        """Count a step: the tenants of the requests that could have a turn, and of those that had one.

        A tenant's share is that of its requests. Tenants without one are forgotten. A tenant with more than its share
        can be behind only once it has lost as much, up to MAX_BEHIND.
        """
        requests, turns = Counter(waiting), Counter(taken)
        share = turns.total() / max(1, requests.total())
        self._behind = {
            tenant_id: min(
                max(self._behind.get(tenant_id, 0.0) + share * number - turns[tenant_id], -MAX_BEHIND), 2 * MAX_BEHIND
            )
            for tenant_id, number in requests.items()
        }


def union_of(experts: Iterable[int]) -> int:
    """Return the experts that any of the requests is predicted to use."""
    union = 0
    for one in experts:
        union |= one
    return union


def choose_by_experts(used: int, candidates: Sequence[int], count: int) -> list[int]:
    """Return the indices of `count` candidates that add few experts to those in `used`, in ascending order.

    A candidate without a prediction, 0, comes first, since its experts are learned only when it decodes. Among equals
    the earlier candidate comes first. The first round has one candidate, so that those of the next ones can share its
    experts. O(ROUNDS · n) unions in the number of candidates.
    """
    chosen = [place for place, one in enumerate(candidates) if not one][:count]
    left = [place for place, one in enumerate(candidates) if one]
    later_rounds, a_round = max(1, -(-(count - len(chosen) - 1) // ROUNDS)), 1
    while len(chosen) < count:
        sizes = {place: (used | candidates[place]).bit_count() for place in left}
        left.sort(key=sizes.__getitem__)
        num_taken, a_round = min(a_round, count - len(chosen)), later_rounds
        taken, left = left[:num_taken], sorted(left[num_taken:])
        used |= union_of([candidates[place] for place in taken])
        chosen += taken
    return sorted(chosen)
