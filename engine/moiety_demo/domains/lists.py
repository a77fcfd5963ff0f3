"""Short lists of numbers: sort, reverse, largest, smallest, sum, length, first, last (unseen lists)."""

from collections.abc import Callable
from itertools import accumulate
from random import Random

from moiety_demo.domains.task import Split, Task, split_of
from moiety_demo.domains.wording import choose_wording

DOMAIN = "lists"
ITEM_LIMIT = 100
SUMMAND_LIMIT = 10

QUESTIONS = {
    "sort": (
        "sort these numbers: {items}.",
        "sort {items} in ascending order.",
        "put these numbers in order: {items}.",
        "arrange {items} from small to large.",
    ),
    "sort_descending": (
        "sort {items} in descending order.",
        "sort these numbers from large to small: {items}.",
        "arrange {items} from large to small.",
    ),
    "reverse": (
        "reverse this list: {items}.",
        "reverse the list {items}.",
        "write the list {items} backwards.",
        "turn the list {items} around.",
    ),
    "max": (
        "what is the largest number in {items}?",
        "find the maximum of {items}.",
        "which is the biggest number in the list {items}?",
        "what is the maximum of this list: {items}?",
    ),
    "min": (
        "what is the smallest number in {items}?",
        "find the minimum of {items}.",
        "which is the lowest number in the list {items}?",
        "what is the minimum of this list: {items}?",
    ),
    "sum": (
        "add up these numbers: {items}.",
        "what is the total of {items}?",
        "what is the sum of the list {items}?",
    ),
    "length": (
        "how many numbers are in the list {items}?",
        "count the items of this list: {items}.",
        "how long is the list {items}?",
        "what is the length of the list {items}?",
    ),
    "first": ("what is the first number in {items}?", "give me the first item of the list {items}."),
    "last": ("what is the last number in {items}?", "give me the last item of the list {items}."),
}


def sample(rng: Random, split: Split) -> Task:
    kind = rng.choices(tuple(QUESTIONS), (2, 2, 2, 1.5, 1.5, 1.5, 1, 0.7, 0.7))[0]
    while True:
        items = _items(rng, kind)
        key = "list " + " ".join(map(str, sorted(items)))
        if split_of(key) is split:
            break
    prompt = choose_wording(rng, QUESTIONS[kind]).format(items=_join(items))
    return Task(DOMAIN, kind, prompt, ANSWERS[kind](items), key)


def _items(rng: Random, kind: str) -> list[int]:
    if kind == "sum":
        return [rng.randrange(SUMMAND_LIMIT) for _ in range(rng.randint(3, 4))]
    return rng.sample(range(ITEM_LIMIT), rng.randint(3, 5))


def _add_up(items: list[int]) -> str:
    """Return the sum one item at a time: 4 + 9 = 13, 13 + 2 = 15."""
    totals = list(accumulate(items))
    return ", ".join(f"{total} + {item} = {total + item}" for total, item in zip(totals, items[1:], strict=False))


def _join(items: list[int]) -> str:
    return ", ".join(map(str, items))


ANSWERS: dict[str, Callable[[list[int]], str]] = {
    "sort": lambda items: _join(sorted(items)),
    "sort_descending": lambda items: _join(sorted(items, reverse=True)),
    "reverse": lambda items: _join(items[::-1]),
    "max": lambda items: str(max(items)),
    "min": lambda items: str(min(items)),
    "sum": _add_up,
    "length": lambda items: str(len(items)),
    "first": lambda items: str(items[0]),
    "last": lambda items: str(items[-1]),
}
