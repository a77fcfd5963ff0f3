"""Sums and differences of numbers up to three digits (unseen operands), and the table to 12 x 12 (unseen wordings)."""

from random import Random

from moiety_demo.domains.task import Split, Task, split_of
from moiety_demo.domains.wording import choose_wording

DOMAIN = "arithmetic"
TABLE_LIMIT = 12

ADD = (
    "what is {a} + {b}?",
    "{a} + {b} = ?",
    "compute {a} + {b}.",
    "what is {a} plus {b}?",
    "add {a} and {b}.",
    "what is the sum of {a} and {b}?",
    "how much is {a} + {b}?",
    "calculate {a} plus {b}.",
)
SUBTRACT = (
    "what is {a} - {b}?",
    "{a} - {b} = ?",
    "compute {a} - {b}.",
    "what is {a} minus {b}?",
    "take {b} from {a}.",
    "subtract {b} from {a}.",
    "how much is {a} - {b}?",
    "calculate {a} minus {b}.",
)
MULTIPLY = (
    "what is {a} * {b}?",
    "{a} * {b} = ?",
    "compute {a} * {b}.",
    "what is {a} times {b}?",
    "multiply {a} by {b}.",
    "what is the product of {a} and {b}?",
    "how much is {a} x {b}?",
    "calculate {a} times {b}.",
)
DIVIDE = (
    "what is {a} / {b}?",
    "{a} / {b} = ?",
    "compute {a} / {b}.",
    "what is {a} divided by {b}?",
    "divide {a} by {b}.",
    "how much is {a} / {b}?",
    "how often does {b} go into {a}?",
    "calculate {a} divided by {b}.",
)


def sample(rng: Random, split: Split) -> Task:
    kind = rng.choices(("add", "subtract", "multiply", "divide"), (5, 5, 1, 1))[0]
    if kind == "add":
        return _sample_sum(rng, split)
    if kind == "subtract":
        return _sample_difference(rng, split)
    return _sample_table(rng, split, kind)


def _number(rng: Random) -> int:
    """Return a number of up to three digits; short numbers are more frequent than in a uniform draw."""
    return rng.randrange((10, 100, 1000)[rng.randrange(3)])


def _sample_sum(rng: Random, split: Split) -> Task:
    while True:
        a, b = _number(rng), _number(rng)
        key = f"add {min(a, b)} {max(a, b)}"
        if split_of(key) is split:
            return Task(DOMAIN, "add", choose_wording(rng, ADD).format(a=a, b=b), str(a + b), key)


def _sample_difference(rng: Random, split: Split) -> Task:
    while True:
        b, a = sorted((_number(rng), _number(rng)))
        key = f"subtract {a} {b}"
        if split_of(key) is split:
            return Task(DOMAIN, "subtract", choose_wording(rng, SUBTRACT).format(a=a, b=b), str(a - b), key)


def _sample_table(rng: Random, split: Split, kind: str) -> Task:
    a, b = rng.randint(2, TABLE_LIMIT), rng.randint(2, TABLE_LIMIT)
    if kind == "multiply":
        template = choose_wording(rng, MULTIPLY, split)
        return Task(DOMAIN, kind, template.format(a=a, b=b), str(a * b), template)
    template = choose_wording(rng, DIVIDE, split)
    return Task(DOMAIN, kind, template.format(a=a * b, b=b), str(a), template)
