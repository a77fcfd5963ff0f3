"""Conversations made of tasks: one or several turns, with and without a system message. Knows no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from moiety_demo.domains import DOMAINS, Split, Task

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful and honest assistant.",
    "You are Moiety, a small demo model.",
    "Answer every question in a short and exact way.",
    "Be brief.",
    "You answer questions about numbers, words and places.",
    "Give only the answer.",
    "You are a friendly assistant that helps people to learn.",
)
SYSTEM_SHARE = 0.2
NUM_TURNS_SHARES = ((1, 0.7), (2, 0.2), (3, 0.1))
DOMAIN_SHARES = {
    "arithmetic": 3.8,
    "strings": 1.3,
    "lists": 1.4,
    "units": 0.9,
    "comparisons": 1.0,
    "capitals": 0.7,
    "descriptions": 0.7,
    "smalltalk": 0.4,
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of a conversation in order; `system` is empty where there is no system message."""

    system: str
    turns: Sequence[Task]


def sample_conversation(rng: Random) -> Conversation:
    """Return one conversation of tasks from the training split."""
    domains = rng.choices(tuple(DOMAIN_SHARES), tuple(DOMAIN_SHARES.values()), k=_num_turns(rng))
    system = rng.choice(SYSTEM_MESSAGES) if rng.random() < SYSTEM_SHARE else ""
    return Conversation(system, [DOMAINS[domain](rng, Split.TRAIN) for domain in domains])


def _num_turns(rng: Random) -> int:
    counts, shares = zip(*NUM_TURNS_SHARES, strict=True)
    return int(rng.choices(counts, shares)[0])
