"""Who says what may follow a sequence's newest token."""

from __future__ import annotations

from typing import Protocol

from moiety_engine.scheduling.speculative_decoding.costs import PassCosts
from moiety_engine.scheduling.speculative_decoding.proposal import Proposal, ProposalAttempt
from moiety_engine.sequence import Sequence


class Proposer(Protocol):
    """What drafts come from. One scheduler's."""

    @property
    def passes(self) -> PassCosts:
        """What drafts cost; nothing where no model says them."""
        ...

    def guess(self, sequence: Sequence, count: int) -> Proposal:
        """Up to `count` tokens, after the one that the running step samples if there is one."""
        ...

    def verified(self, sequence: Sequence, num_right: int, *, one_wrong: bool) -> None:
        """So many tokens of a draft came true, and the one after them did or did not."""
        ...

    def attempt(self, sequences: list[Sequence], guesses: list[Proposal]) -> ProposalAttempt | None:
        """Where nothing pays by what is known: what to try all the same, now and then, to know more."""
        ...
