"""Prices of a model's requests by service class, built once for all requests that share them."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from moiety_platform.classes.terms import Catalogue, ChosenClass
from moiety_platform.prices.terms import Price, PriceList

MAX_TARIFFS = 1024  # each adapter has its own tariff

FREE = Price(0, 0, 0)


class Tariff:
    """Prices of the classes that may serve a request. Shared by many requests. Immutable."""

    __slots__ = ("dearest", "is_complete", "prices")

    def __init__(self, by_class: Mapping[str, Price | None]) -> None:
        """Create a tariff. The price None means that the model has no price."""
        self.prices = {name: price for name, price in by_class.items() if price is not None}
        self.is_complete = len(self.prices) == len(by_class)
        self.dearest = functools.reduce(Price.most, self.prices.values(), FREE)
        """Upper bound of the price, whichever class serves."""


NO_TARIFF = Tariff({})


class Tariffs:
    """Cache of tariffs, cleared when prices or classes change. For one event loop."""

    def __init__(self) -> None:
        self._prices: PriceList | None = None
        self._catalogue: Catalogue | None = None
        self._made: dict[tuple[str, str, str, str | None], Tariff] = {}

    def of(self, prices: PriceList, catalogue: Catalogue, chosen: ChosenClass, model: str, base: str) -> Tariff:
        """Return the tariff with the model's own prices, or those of its base model for an adapter."""
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
