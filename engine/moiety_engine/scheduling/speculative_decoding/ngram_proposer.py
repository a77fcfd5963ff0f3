"""Guesses by looking up what the text said before. They cost nothing, and are compared with what comes in any case."""

from __future__ import annotations

from moiety_engine.scheduling.speculative_decoding.costs import PassCosts
from moiety_engine.scheduling.speculative_decoding.history import AcceptanceHistory
from moiety_engine.scheduling.speculative_decoding.proposal import Proposal, ProposalAttempt
from moiety_engine.sequence import Sequence


class NgramProposer:
    """A Guesser."""

    def __init__(self) -> None:
        self.passes = PassCosts()

    def guess(self, sequence: Sequence, count: int) -> Proposal:
        """The token that the running step samples is guessed, too, and not drafted."""
        history: AcceptanceHistory | None = sequence.history
        if history is None:
            history = sequence.history = AcceptanceHistory()
        draft = history.guess(sequence, count + 1)
        first = chance = history.chance
        if sequence.pending:
            draft, first = draft[1:], chance * chance
        return Proposal(draft[:count], first, chance)

    def verified(self, sequence: Sequence, num_right: int, *, one_wrong: bool) -> None:
        """The text itself will tell."""

    def attempt(self, sequences: list[Sequence], guesses: list[Proposal]) -> ProposalAttempt | None:
        return None
