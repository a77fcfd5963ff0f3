"""Interface of proposers, which predict the tokens after a sequence's newest token."""

from __future__ import annotations

from typing import Protocol

from moiety_engine.scheduling.speculative_decoding.costs import PassCosts
from moiety_engine.scheduling.speculative_decoding.proposal import Proposal, ProposalAttempt
from moiety_engine.sequence import Sequence


class Proposer(Protocol):
    """Source of drafts. Each scheduler has its own."""

    @property
    def passes(self) -> PassCosts:
        """Costs of drafts; zero without a draft model."""
        ...

    def propose(self, sequence: Sequence, count: int) -> Proposal:
        """Return up to `count` tokens that follow the newest token, or the pending one if there is one."""
        ...

    def verified(self, sequence: Sequence, num_right: int, *, one_wrong: bool) -> None:
        """Record the result of a verified draft: `num_right` accepted tokens, and whether the next one was rejected."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended."""
        ...

    def attempt(self, sequences: list[Sequence], proposals: list[Proposal]) -> ProposalAttempt | None:
        """Return a draft to try now and then when no draft is known to pay, to learn more; None for no attempt."""
        ...
