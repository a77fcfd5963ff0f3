"""Comparisons of two numbers, their order, and whether a number is odd or even (unseen operands)."""

from random import Random

from moiety_demo.domains.task import Split, Task, split_of
from moiety_demo.domains.wording import choose_wording

DOMAIN = "comparisons"
LIMIT = 1000

LARGER = (
    "which is larger, {a} or {b}?",
    "which number is greater: {a} or {b}?",
    "name the bigger one of {a} and {b}.",
    "what is the larger of {a} and {b}?",
)
SMALLER = (
    "which is smaller, {a} or {b}?",
    "which number is less: {a} or {b}?",
    "name the smaller one of {a} and {b}.",
    "what is the smaller of {a} and {b}?",
)
ORDER = (
    "compare {a} and {b}.",
    "how do {a} and {b} compare?",
    "put {a} and {b} in order.",
    "which comes first, {a} or {b}?",
)
PARITY = (
    "is {a} odd or even?",
    "is {a} even or odd?",
    "tell whether {a} is odd or even.",
    "is the number {a} even or odd?",
)


def sample(rng: Random, split: Split) -> Task:
    kind = rng.choice(("larger", "smaller", "order", "parity"))
    if kind == "parity":
        return _sample_parity(rng, split)
    while True:
        a, b = _pair(rng)
        low, high = min(a, b), max(a, b)
        key = f"compare {low} {high}"
        if split_of(key) is split:
            break
    questions, answer = {
        "larger": (LARGER, str(high)),
        "smaller": (SMALLER, str(low)),
        "order": (ORDER, f"{low} < {high}"),
    }[kind]
    return Task(DOMAIN, kind, choose_wording(rng, questions).format(a=a, b=b), answer, key)


def _pair(rng: Random) -> tuple[int, int]:
    """Return two different numbers, half of the time close to each other, so that every digit matters."""
    a = rng.randrange((100, LIMIT)[rng.randrange(2)])
    while True:
        b = rng.randrange(LIMIT) if rng.random() < 0.5 else max(0, a + rng.randint(-30, 30))
        if a != b:
            return (a, b) if rng.random() < 0.5 else (b, a)


def _sample_parity(rng: Random, split: Split) -> Task:
    while True:
        a = rng.randrange(LIMIT)
        key = f"parity {a}"
        if split_of(key) is split:
            break
    answer = f"It ends in {a % 10}, so it is {'odd' if a % 2 else 'even'}."
    return Task(DOMAIN, "parity", choose_wording(rng, PARITY).format(a=a), answer, key)
