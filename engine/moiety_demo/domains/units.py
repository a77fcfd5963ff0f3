"""Conversions from a larger unit to a smaller one: metric (unseen amounts), time and others (unseen wordings)."""

from dataclasses import dataclass
from random import Random

from moiety_demo.domains.task import Split, Task, split_of
from moiety_demo.domains.wording import choose_wording

DOMAIN = "units"
METRIC_LIMIT = 999
TABLE_LIMIT = 20


@dataclass(frozen=True, slots=True)
class Conversion:
    source: str
    target: str
    factor: int


METRIC = (
    Conversion("kilometers", "meters", 1000),
    Conversion("meters", "centimeters", 100),
    Conversion("meters", "millimeters", 1000),
    Conversion("centimeters", "millimeters", 10),
    Conversion("kilograms", "grams", 1000),
    Conversion("grams", "milligrams", 1000),
    Conversion("tonnes", "kilograms", 1000),
    Conversion("liters", "milliliters", 1000),
    Conversion("euros", "cents", 100),
)
TABLE = (
    Conversion("hours", "minutes", 60),
    Conversion("minutes", "seconds", 60),
    Conversion("days", "hours", 24),
    Conversion("weeks", "days", 7),
    Conversion("years", "months", 12),
    Conversion("feet", "inches", 12),
    Conversion("yards", "feet", 3),
    Conversion("gallons", "pints", 8),
    Conversion("pounds", "ounces", 16),
)
QUESTIONS = (
    "convert {n} {source} to {target}.",
    "how many {target} are {n} {source}?",
    "how many {target} are there in {n} {source}?",
    "what is {n} {source} in {target}?",
    "express {n} {source} in {target}.",
    "write {n} {source} as {target}.",
    "change {n} {source} into {target}.",
    "{n} {source} in {target}?",
)


def sample(rng: Random, split: Split) -> Task:
    if rng.random() < 0.5:
        return _sample_metric(rng, split)
    conversion = rng.choice(TABLE)
    template = choose_wording(rng, QUESTIONS, split)
    return _task("table", conversion, rng.randint(2, TABLE_LIMIT), template, template)


def _sample_metric(rng: Random, split: Split) -> Task:
    while True:
        conversion, amount = rng.choice(METRIC), rng.randint(2, (99, METRIC_LIMIT)[rng.randrange(2)])
        key = f"{conversion.source} {conversion.target} {amount}"
        if split_of(key) is split:
            return _task("metric", conversion, amount, choose_wording(rng, QUESTIONS), key)


def _task(kind: str, conversion: Conversion, amount: int, template: str, key: str) -> Task:
    prompt = template.format(n=amount, source=conversion.source, target=conversion.target)
    return Task(DOMAIN, kind, prompt, f"{amount * conversion.factor} {conversion.target}", key)
