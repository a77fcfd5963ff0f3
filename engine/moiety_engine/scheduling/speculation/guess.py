"""What may follow a sequence's newest token, and who says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from moiety_engine.sequence import Sequence

if TYPE_CHECKING:
    from moiety_engine.scheduling.speculation.costs import PassCosts


class Guess(NamedTuple):
    """`first`: the chance that its first token is right; `chance`: that one is right after others that are. Tokens that
    a draft model is to say are PENDING."""

    token_ids: list[int]
    first: float = 0.0
    chance: float = 0.0
    num_behind: int = 0  # tokens that a draft model must take in before it says the first; 0: no model says it
    num_left: int = 1  # tokens that the answer may still have


class Attempt(NamedTuple):
    """A draft of so many tokens, of the sequence at this place."""

    place: int
    num_tokens: int


class Guesser(Protocol):
    """What drafts come from. One scheduler's."""

    @property
    def passes(self) -> PassCosts:
        """What drafts cost; nothing where no model says them."""
        ...

    def guess(self, sequence: Sequence, count: int) -> Guess:
        """Up to `count` tokens, after the one that the running step samples if there is one."""
        ...

    def verified(self, sequence: Sequence, num_right: int, *, one_wrong: bool) -> None:
        """So many tokens of a draft came true, and the one after them did or did not."""
        ...

    def attempt(self, sequences: list[Sequence], guesses: list[Guess]) -> Attempt | None:
        """Where nothing pays by what is known: what to try all the same, now and then, to know more."""
        ...
