"""Guesses by a second, small model. What it will say is not known before it is asked, which costs passes of it, so how
often it is right is learned from drafts that were verified, and where none pay one is tried now and then."""

from __future__ import annotations

from moiety_engine.scheduling.speculative_decoding.costs import PassCosts
from moiety_engine.scheduling.speculative_decoding.drafted_kv import DraftedKv
from moiety_engine.scheduling.speculative_decoding.proposal import Proposal, ProposalAttempt
from moiety_engine.sequence import PENDING, Sequence

_FIRST_CHANCE = 0.6
_LEAST_WEIGHT = 0.1  # of the newest token for its sequence: the last ten or so count
_LEAST_WEIGHT_FOR_ALL = 0.02
_FEW = 4  # tokens of its own with which a sequence counts as much as all others do
_TRIED_TOKENS = 3
_PAUSE, _LONGEST_PAUSE = 64, 4096  # looks from one try to the next
_LONGER = 4  # times, where one was in vain: what tries take in all is soon little


class _AcceptanceRate:
    """That a drafted token is right, where all before it are: of the newest ones."""

    __slots__ = ("_least_weight", "num_seen", "value")

    def __init__(self, least_weight: float) -> None:
        self.value, self.num_seen, self._least_weight = _FIRST_CHANCE, 0, least_weight

    def saw(self, *, right: bool) -> None:
        self.num_seen += 1
        self.value += max(self._least_weight, 1 / (self.num_seen + 1)) * (right - self.value)


class DraftModelProposer:
    """A Guesser."""

    def __init__(self, kv: DraftedKv, max_context: int) -> None:
        """`max_context`: tokens that the draft model can read."""
        self.passes = PassCosts()
        self._kv = kv
        self._max_context = max_context
        self._of_all = _AcceptanceRate(_LEAST_WEIGHT_FOR_ALL)
        self._pause = 1
        self._num_idle = 0  # looks since a draft was verified
        self._tried = -1  # key of the sequence whose draft was no more than tried

    def guess(self, sequence: Sequence, count: int) -> Proposal:
        """Tokens that are yet to be said."""
        own: _AcceptanceRate | None = sequence.history
        if own is None:
            own = sequence.history = _AcceptanceRate(_LEAST_WEIGHT)
        num_tokens = len(sequence.tokens)
        count = min(count, self._max_context - num_tokens)
        if count <= 0:
            return Proposal([])
        chance = (own.num_seen * own.value + _FEW * self._of_all.value) / (own.num_seen + _FEW)
        num_behind = self._kv.num_behind(sequence)
        num_left = sequence.submit.max_tokens - sequence.num_output
        return Proposal([PENDING] * count, chance, chance, num_behind, max(1, num_left))

    def verified(self, sequence: Sequence, num_right: int, *, one_wrong: bool) -> None:
        for right in [True] * num_right + [False] * one_wrong:
            sequence.history.saw(right=right)
            self._of_all.saw(right=right)
        if sequence.key != self._tried:
            self._pause = _PAUSE
        else:
            self._pause = min(_LONGER * self._pause, _LONGEST_PAUSE) if one_wrong else 1
        self._tried, self._num_idle = -1, 0

    def attempt(self, sequences: list[Sequence], guesses: list[Proposal]) -> ProposalAttempt | None:
        """A short draft of whoever is nearest."""
        self._num_idle += 1
        if self._num_idle < self._pause:
            return None
        nearest = min(
            ((guess.num_behind, place) for place, guess in enumerate(guesses) if guess.token_ids), default=None
        )
        if nearest is None:
            return None
        self._tried = sequences[nearest[1]].key
        return ProposalAttempt(nearest[1], _TRIED_TOKENS)
