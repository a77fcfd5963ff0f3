"""Proposals by n-gram lookup in the text. They cost nothing, and are always compared with the actual tokens."""

from __future__ import annotations

from moiety_engine.scheduling.speculative_decoding.costs import PassCosts
from moiety_engine.scheduling.speculative_decoding.history import AcceptanceHistory
from moiety_engine.scheduling.speculative_decoding.proposal import Proposal, ProposalAttempt
from moiety_engine.sequence import Sequence


class NgramProposer:
    """Proposer that uses n-gram lookup."""

    def __init__(self) -> None:
        self.passes = PassCosts()
        self._histories: dict[Sequence, AcceptanceHistory] = {}

    def propose(self, sequence: Sequence, count: int) -> Proposal:
        """Return a proposal. The token that the running step samples is proposed too, but not drafted."""
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = AcceptanceHistory()
        draft = history.propose(sequence, count + 1)
        first = acceptance = history.acceptance
        if sequence.pending:
            draft, first = draft[1:], acceptance * acceptance
        return Proposal(draft[:count], first, acceptance)

    def verified(self, sequence: Sequence, num_right: int, *, one_wrong: bool) -> None:
        """Do nothing: the history compares proposals with the text."""

    def ended(self, sequence: Sequence) -> None:
        self._histories.pop(sequence, None)

    def attempt(self, sequences: list[Sequence], proposals: list[Proposal]) -> ProposalAttempt | None:
        return None
