"""What has been guessed for one request, and how often that came true."""

from __future__ import annotations

from moiety_engine.scheduling.speculative_decoding.ngrams import NgramIndex, continuation
from moiety_engine.sequence import Sequence

_FIRST_CHANCE = 0.5
_LEAST_WEIGHT = 0.1  # of the newest token: the last ten or so count


class AcceptanceHistory:
    """Guesses are compared with what comes also where nothing of them was computed, which costs nothing: so a text that
    begins to repeat itself is noticed. One that ended on LONG words is counted apart from one on SHORT words."""

    __slots__ = ("_chances", "_counts", "_guess", "_guessed_at", "_index", "_kind")

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._chances = [_FIRST_CHANCE, _FIRST_CHANCE]
        self._counts = [0, 0]
        self._guess: list[int] = []
        self._guessed_at = 0
        self._kind = 0

    def guess(self, sequence: Sequence, count: int) -> list[int]:
        """Up to `count` tokens that may follow those that are known; none if its last words are new."""
        tokens, num_known = sequence.tokens, sequence.num_known
        self._compare(tokens, num_known)
        found = self._index.find(tokens, num_known)
        self._guess = []
        if found is not None:
            begin, self._kind = found
            self._guess = continuation(tokens, num_known, begin, count)
            self._guessed_at = num_known
        return self._guess

    @property
    def chance(self) -> float:
        """That a guessed token is right, where all before it are."""
        return self._chances[self._kind]

    def _compare(self, tokens: list[int], num_known: int) -> None:
        kind = self._kind
        for guessed, token in zip(self._guess, tokens[self._guessed_at : num_known], strict=False):
            self._counts[kind] += 1
            weight = max(_LEAST_WEIGHT, 1 / (self._counts[kind] + 1))
            self._chances[kind] += weight * ((guessed == token) - self._chances[kind])
            if guessed != token:
                break
