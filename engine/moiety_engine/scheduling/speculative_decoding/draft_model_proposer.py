"""Proposals of a draft model: a second, small model, or the multi-token prediction (MTP) layers of the served one.

Its tokens are unknown until it runs, which costs passes. So its acceptance rate is learned from verified drafts, and if
no drafts pay, one is tried now and then.
"""

from __future__ import annotations

from moiety_engine.scheduling.speculative_decoding.costs import PassCosts
from moiety_engine.scheduling.speculative_decoding.drafted_kv import DraftedKv
from moiety_engine.scheduling.speculative_decoding.proposal import Proposal, ProposalAttempt
from moiety_engine.sequence import PENDING, Sequence

_INITIAL_ACCEPTANCE = 0.6
_MIN_WEIGHT = 0.1  # of the newest token for its sequence: about the last ten count
_MIN_WEIGHT_FOR_ALL = 0.02
_MIN_OWN_TOKENS = 4  # own tokens at which a sequence counts as much as all others
_TRIED_TOKENS = 3
_PAUSE, _LONGEST_PAUSE = 64, 4096  # calls between two attempts
_LONGER = 4  # factor after a failed attempt, so that attempts soon cost little in all


class _AcceptanceRate:
    """Probability that a draft token is accepted if all before it are; a mean of the newest tokens."""

    __slots__ = ("_least_weight", "num_seen", "value")

    def __init__(self, least_weight: float) -> None:
        self.value, self.num_seen, self._least_weight = _INITIAL_ACCEPTANCE, 0, least_weight

    def record(self, *, accepted: bool) -> None:
        self.num_seen += 1
        self.value += max(self._least_weight, 1 / (self.num_seen + 1)) * (accepted - self.value)


class DraftModelProposer:
    """Proposer that uses a draft model."""

    def __init__(self, kv: DraftedKv, max_context: int) -> None:
        """Create the proposer. `max_context` is the context length of the draft model, in tokens."""
        self.passes = PassCosts()
        self._kv = kv
        self._max_context = max_context
        self._rates: dict[Sequence, _AcceptanceRate] = {}
        self._of_all = _AcceptanceRate(_MIN_WEIGHT_FOR_ALL)
        self._pause = 1
        self._num_idle = 0  # calls since a draft was verified
        self._tried = -1  # key of the sequence whose draft was an attempt

    def propose(self, sequence: Sequence, count: int) -> Proposal:
        """Return a proposal whose tokens the draft model has yet to generate."""
        own = self._rates.get(sequence)
        if own is None:
            own = self._rates[sequence] = _AcceptanceRate(_MIN_WEIGHT)
        num_tokens = len(sequence.tokens)
        count = min(count, self._max_context - num_tokens)
        if count <= 0:
            return Proposal([])
        acceptance = (own.num_seen * own.value + _MIN_OWN_TOKENS * self._of_all.value) / (
            own.num_seen + _MIN_OWN_TOKENS
        )
        num_behind = self._kv.num_behind(sequence)
        num_left = sequence.request.submit.max_tokens - sequence.num_output
        return Proposal([PENDING] * count, acceptance, acceptance, num_behind, max(1, num_left))

    def verified(self, sequence: Sequence, num_right: int, *, one_wrong: bool) -> None:
        own = self._rates.get(sequence)  # None if it ended with these tokens
        for right in [True] * num_right + [False] * one_wrong:
            if own is not None:
                own.record(accepted=right)
            self._of_all.record(accepted=right)
        if sequence.key != self._tried:
            self._pause = _PAUSE
        else:
            self._pause = min(_LONGER * self._pause, _LONGEST_PAUSE) if one_wrong else 1
        self._tried, self._num_idle = -1, 0

    def ended(self, sequence: Sequence) -> None:
        self._rates.pop(sequence, None)

    def attempt(self, sequences: list[Sequence], proposals: list[Proposal]) -> ProposalAttempt | None:
        """Propose a short draft of the sequence that the draft model is least behind."""
        self._num_idle += 1
        if self._num_idle < self._pause:
            return None
        nearest = min(
            ((proposal.num_behind, place) for place, proposal in enumerate(proposals) if proposal.token_ids),
            default=None,
        )
        if nearest is None:
            return None
        self._tried = sequences[nearest[1]].key
        return ProposalAttempt(nearest[1], _TRIED_TOKENS)
