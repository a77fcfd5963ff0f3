"""What may follow a sequence's newest token."""

from __future__ import annotations

from typing import NamedTuple


class Proposal(NamedTuple):
    """`first`: the chance that its first token is right; `chance`: that one is right after others that are. Tokens that
    a draft model is to say are PENDING."""

    token_ids: list[int]
    first: float = 0.0
    chance: float = 0.0
    num_behind: int = 0  # tokens that a draft model must take in before it says the first; 0: no model says it
    num_left: int = 1  # tokens that the answer may still have


class ProposalAttempt(NamedTuple):
    """A draft of so many tokens, of the sequence at this place."""

    place: int
    num_tokens: int
