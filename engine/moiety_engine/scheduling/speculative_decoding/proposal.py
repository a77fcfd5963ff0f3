"""Proposals of the tokens that follow a sequence's newest token."""

from __future__ import annotations

from typing import NamedTuple


class Proposal(NamedTuple):
    """Proposed tokens.

    `first` is the probability that the first token is accepted, `acceptance` that of each later token if all before it
    are. Tokens that a draft model has yet to generate are PENDING.
    """

    token_ids: list[int]
    first: float = 0.0
    acceptance: float = 0.0
    num_behind: int = 0  # tokens that a draft model must process before the first one; 0: no draft model
    num_left: int = 1  # tokens that the output may still have


class ProposalAttempt(NamedTuple):
    """Draft of `num_tokens` tokens for the sequence at index `place`, to learn its acceptance."""

    place: int
    num_tokens: int
