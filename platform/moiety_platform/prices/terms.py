"""What tokens cost. Pure, in integers: prices are nano-dollars a million tokens, costs nano-dollars."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

import msgspec

MILLION = 10**6
NANO = 10**9
MAX_DOLLARS = 10**6
DOLLARS = re.compile(rf"[0-9]{{1,6}}(\.[0-9]{{1,9}})?|{MAX_DOLLARS}(\.0{{1,9}})?")
ANY_CLASS = ""  # of a price that holds for every class of a model, times the class's factor


class Price(msgspec.Struct, frozen=True):
    """Of a million prompt tokens, of those of them that the cache held, and of a million output tokens."""

    input: int
    cached_input: int
    output: int

    def cost(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """In nano-dollars, a part of one rounded up; so never less for more tokens."""
        fresh = prompt_tokens - cached_tokens
        total = fresh * self.input + cached_tokens * self.cached_input + output_tokens * self.output
        return -(-total // MILLION)

    def times(self, factor: float) -> Price:
        """The price of a class with that factor."""
        return self if factor == 1 else _times(self, factor)

    def most(self, other: Price) -> Price:
        """The dearer of two in every respect."""
        return Price(
            max(self.input, other.input),
            max(self.cached_input, other.cached_input),
            max(self.output, other.output),
        )


@functools.lru_cache(maxsize=1024)
def _times(price: Price, factor: float) -> Price:
    exact = Decimal(repr(factor))
    return Price(*(round(exact * part) for part in (price.input, price.cached_input, price.output)))


@dataclass(frozen=True, slots=True)
class PriceList:
    """All prices at one moment, by model and class."""

    prices: Mapping[tuple[str, str], Price]

    def of(self, model: str, service_class: str, factor: float) -> Price | None:
        """The model's price in this class; where none was set for the class, the model's own times the class's factor.
        None for a model without a price."""
        exact = self.prices.get((model, service_class))
        if exact is not None:
            return exact
        general = self.prices.get((model, ANY_CLASS))
        return None if general is None else general.times(factor)


def dollars(nano: int) -> str:
    """Nano-dollars as exact dollars, without needless zeros: 0.15."""
    return f"{Decimal(nano) / NANO:f}"


def parse_dollars(text: str) -> int:
    """Exact dollars as nano-dollars. Raises ValueError for what is no such amount, or finer than a nano-dollar."""
    if not DOLLARS.fullmatch(text):
        raise ValueError(
            f"{text[:64]!r} is not an amount of dollars, such as 0.15, from 0 to {MAX_DOLLARS} with at most 9 decimals"
        )
    return int(Decimal(text) * NANO)
