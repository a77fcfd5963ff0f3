"""History of one request's n-gram proposals and their acceptance."""

from __future__ import annotations

from moiety_engine.scheduling.speculative_decoding.ngrams import NgramIndex, continuation
from moiety_engine.sequence import Sequence

_INITIAL_ACCEPTANCE = 0.5
_MIN_WEIGHT = 0.1  # of the newest token: about the last ten count


class AcceptanceHistory:
    """Acceptance of one request's n-gram proposals.

    Proposals are compared with the actual tokens even if they were not drafted, at no cost, so that a text that starts
    to repeat itself is noticed. Matches of LONG and of SHORT tokens are counted separately.
    """

    __slots__ = ("_acceptance_rates", "_continuation", "_continuation_begin", "_counts", "_index", "_kind")

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._acceptance_rates = [_INITIAL_ACCEPTANCE, _INITIAL_ACCEPTANCE]
        self._counts = [0, 0]
        self._continuation: list[int] = []
        self._continuation_begin = 0
        self._kind = 0

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """Return up to `count` tokens that may follow the known ones; empty if the newest tokens are new."""
        tokens, num_known = sequence.tokens, sequence.num_known
        self._compare(tokens, num_known)
        found = self._index.find(tokens, num_known)
        self._continuation = []
        if found is not None:
            begin, self._kind = found
            self._continuation = continuation(tokens, num_known, begin, count)
            self._continuation_begin = num_known
        return self._continuation

    @property
    def acceptance(self) -> float:
        """Probability that a proposed token is accepted if all before it are."""
        return self._acceptance_rates[self._kind]

    def _compare(self, tokens: list[int], num_known: int) -> None:
        kind = self._kind
        for proposed, token in zip(self._continuation, tokens[self._continuation_begin : num_known], strict=False):
            self._counts[kind] += 1
            weight = max(_MIN_WEIGHT, 1 / (self._counts[kind] + 1))
            self._acceptance_rates[kind] += weight * ((proposed == token) - self._acceptance_rates[kind])
            if proposed != token:
                break
