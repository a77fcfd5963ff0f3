"""What requests of a model may be charged, by the class that serves them; made once for all that have it in common."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from moiety_platform.classes.terms import Catalogue, ChosenClass
from moiety_platform.prices.terms import Price, PriceList

MAX_TARIFFS = 1024  # each adapter has its own

FREE = Price(0, 0, 0)


class Tariff:
    """The prices of the classes that a request may be served in, which many requests have in common. Immutable."""

    __slots__ = ("dearest", "is_complete", "prices")

    def __init__(self, by_class: Mapping[str, Price | None]) -> None:
        """None is a model without a price."""
        self.prices = {name: price for name, price in by_class.items() if price is not None}
        self.is_complete = len(self.prices) == len(by_class)
        self.dearest = functools.reduce(Price.most, self.prices.values(), FREE)
        """At most this is charged, whichever class serves."""


NO_TARIFF = Tariff({})


class Tariffs:
    """Those in use, until prices or classes are read again. One event loop."""

    def __init__(self) -> None:
        self._prices: PriceList | None = None
        self._catalogue: Catalogue | None = None
        self._made: dict[tuple[str, str, str, str | None], Tariff] = {}

    def of(self, prices: PriceList, catalogue: Catalogue, chosen: ChosenClass, model: str, base: str) -> Tariff:
        """By the model's own prices, or those of the one that it is with an adapter."""
        if prices is not self._prices or catalogue is not self._catalogue or len(self._made) >= MAX_TARIFFS:
            self._prices, self._catalogue, self._made = prices, catalogue, {}
        key = (model, base, chosen.service.name, None if chosen.fallback is None else chosen.fallback.name)
        tariff = self._made.get(key)
        if tariff is None:
            tariff = self._made[key] = _tariff_of(prices, catalogue, chosen, model, base)
        return tariff


def _tariff_of(prices: PriceList, catalogue: Catalogue, chosen: ChosenClass, model: str, base: str) -> Tariff:
    by_class = {}
    for service in (chosen.service, chosen.fallback):
        if service is not None:
            name, factor = service.name, catalogue[service.name].price_factor
            by_class[name] = prices.of(model, name, factor) or prices.of(base, name, factor)
    return Tariff(by_class)
