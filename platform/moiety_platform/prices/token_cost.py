"""Token prices and costs. Pure, in integers: prices are nano-dollars per million tokens, costs nano-dollars."""

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
ANY_CLASS = ""  # class of a price for every class of a model, times the class's factor


class Price(msgspec.Struct, frozen=True):
    """Prices of a million prompt tokens, of a million cached prompt tokens, and of a million output tokens."""

    input: int
    cached_input: int
    output: int

    def cost(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Return the cost in nano-dollars, rounded up; so it never falls with more tokens."""
        fresh = prompt_tokens - cached_tokens
        total = fresh * self.input + cached_tokens * self.cached_input + output_tokens * self.output
        return -(-total // MILLION)

    def times(self, factor: float) -> Price:
        """Return the price of a class with that factor."""
        return self if factor == 1 else _times(self, factor)

    def most(self, other: Price) -> Price:
        """Return the higher of the two prices in every field."""
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
        """Return the model's price in this class; None for a model without a price.

        Without a price for the class, it is the model's own times the class's factor.
        """
        exact = self.prices.get((model, service_class))
        if exact is not None:
            return exact
        general = self.prices.get((model, ANY_CLASS))
        return None if general is None else general.times(factor)


def dollars(nano: int) -> str:
    """Return nano-dollars as exact dollars, without needless zeros: 0.15."""
    return f"{Decimal(nano) / NANO:f}"


def parse_dollars(text: str) -> int:
    """Return exact dollars as nano-dollars.

    Raises ValueError for an invalid amount, or one finer than a nano-dollar.
    """
    if not DOLLARS.fullmatch(text):
        raise ValueError(
            f"{text[:64]!r} is not an amount of dollars, such as 0.15, from 0 to {MAX_DOLLARS} with at most 9 decimals"
        )
    return int(Decimal(text) * NANO)


FREE = Price(0, 0, 0)
