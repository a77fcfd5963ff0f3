"""Guesses by looking up what the text said before. They cost nothing, and are compared with what comes in any case."""

from __future__ import annotations

from moiety_engine.scheduling.speculation.costs import PassCosts
from moiety_engine.scheduling.speculation.guess import Attempt, Guess
from moiety_engine.scheduling.speculation.history import History
from moiety_engine.sequence import Sequence


class LookupGuesser:
    """A Guesser."""

    def __init__(self) -> None:
        self.passes = PassCosts()

    def guess(self, sequence: Sequence, count: int) -> Guess:
        """The token that the running step samples is guessed, too, and not drafted."""
        history: History | None = sequence.history
        if history is None:
            history = sequence.history = History()
        draft = history.guess(sequence, count + 1)
        first = chance = history.chance
        if sequence.pending:
            draft, first = draft[1:], chance * chance
        return Guess(draft[:count], first, chance)

    def verified(self, sequence: Sequence, num_right: int, *, one_wrong: bool) -> None:
        """The text itself will tell."""

    def attempt(self, sequences: list[Sequence], guesses: list[Guess]) -> Attempt | None:
        return None
