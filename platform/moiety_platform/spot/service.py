"""Spot prices of one gateway process: published once for each interval in the database, which all gateways read.

A price is needed only when a request, a quote or a list asks for it, so that a deployment without spot classes runs no
statement. Without a database the last price holds to the end of its interval; afterwards requests of spot classes fail
closed (503).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge
from sqlalchemy import ColumnElement, select

from moiety_platform.classes.terms import Catalogue, ChosenClass, ClassTerms
from moiety_platform.clock import Clock
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import BadRequest, Unavailable
from moiety_platform.inference.quota_reservation import Tariff
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.spot import store
from moiety_platform.spot.pricing import idle_capacity, spot_percent
from moiety_platform.spot.terms import MAX_PERCENT_FIELD, SpotPrice
from moiety_wire.messages import ModelCard

FAILURE_PAUSE_S = 1.0
PRICE_UNAVAILABLE = "spot_price_unavailable"


class SpotMetrics:
    """Gauges of the spot prices that this process has used last."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("model", "service_class")
        text = "Spot price in percent of the class's price, as this gateway used it last."
        self._percent = Gauge("moiety_spot_price_percent", text, labels, registry=registry)
        text = "Predicted idle capacity in percent, from which the spot price was computed."
        self._idle = Gauge("moiety_spot_idle_percent", text, labels, registry=registry)

    def observe(self, model: str, service_class: str, price: SpotPrice) -> None:
        self._percent.labels(model, service_class).set(price.percent)
        self._idle.labels(model, service_class).set(price.idle_percent)


@dataclass(frozen=True, slots=True)
class _KnownPrice:
    price: SpotPrice
    until_s: float  # monotonic


@dataclass(frozen=True, slots=True)
class _StoreFailure:
    """A failure of the store, which is not asked again before `until_s` (monotonic)."""

    message: str
    code: str | None
    until_s: float


@dataclass(eq=False)
class SpotPrices:
    """Spot prices. `interval_s` may be replaced, for later intervals. For one event loop.

    One request at a time asks the store for the price of a model and class. When the store fails, all others get the
    failure for FAILURE_PAUSE_S instead of waiting for a time-out each.
    """

    database: Database
    states: Callable[[], Sequence[EngineState]]
    clock: Clock
    metrics: SpotMetrics
    interval_s: float
    now: Callable[[], ColumnElement[int]] = now_ms
    _known: dict[tuple[str, str], _KnownPrice] = field(default_factory=dict)
    _publishing: dict[tuple[str, str], asyncio.Lock] = field(default_factory=dict)
    _failure: _StoreFailure | None = None

    async def price_of(self, terms: ClassTerms, model: str) -> SpotPrice:
        """Return the current price of a spot class for a model. Raises Unavailable."""
        key = model, terms.service.name
        known = self._valid(key)
        if known is None:
            async with self._publishing.setdefault(key, asyncio.Lock()):
                known = self._valid(key)
                if known is None:
                    known = self._known[key] = await self._read_or_publish(terms, model)
                    self.metrics.observe(*key, known.price)
        return known.price

    def _valid(self, key: tuple[str, str]) -> _KnownPrice | None:
        known = self._known.get(key)
        return known if known is not None and self.clock.monotonic() < known.until_s else None

    def forget(self) -> None:
        """Read the prices again from the database before they are used."""
        self._known.clear()
        self._failure = None

    def models(self) -> list[str]:
        """Return the models whose engines serve spot classes."""
        return sorted({one.card.model for one in self.states() if one.card is not None and one.card.serves_spot})

    async def agree(
        self, record: RequestRecord, catalogue: Catalogue, chosen: ChosenClass, card: ModelCard, regular: Tariff
    ) -> Tariff:
        """Return the tariff of a request of a spot class at the current price, which is noted in its record.

        A request that is classified a second time keeps its price. Raises BadRequest where the engine does not serve
        spot classes, Conflict above the client's limit, or Unavailable.
        """
        name = chosen.service.name
        if not card.serves_spot:
            raise BadRequest(
                f"The engine of {card.model!r} does not serve the spot class {name!r}: it is an external engine or an "
                "encoder, or does not run --policy moiety. Choose another service_tier or model.",
                code="spot_not_supported",
            )
        price = record.spot_price if record.spot_price is not None and record.spot_model == card.model else None
        if price is None:
            price = await self.price_of(catalogue[name], card.model)
            limit = record.fields.get(MAX_PERCENT_FIELD)
            if limit is not None:
                price.require_at_most(limit)
        record.spot_price, record.spot_model = price, card.model
        return price.tariff(regular, name)

    @asynccontextmanager
    async def _asking_store(self) -> AsyncIterator[None]:
        """Note a failure of the store. Raises Unavailable at once while the last one is recent."""
        failure = self._failure
        if failure is not None and self.clock.monotonic() < failure.until_s:
            raise Unavailable(failure.message, code=failure.code, retry_after_s=FAILURE_PAUSE_S)
        try:
            yield
        except Unavailable as exc:
            self._failure = _StoreFailure(exc.message, exc.code, self.clock.monotonic() + FAILURE_PAUSE_S)
            raise

    async def _read_or_publish(self, terms: ClassTerms, model: str) -> _KnownPrice:
        name = terms.service.name
        async with self._asking_store(), self.database.read() as session:
            unix_ms = await session.scalar(select(self.now()))
            assert unix_ms is not None
            found = await store.find_price(session, model, name, unix_ms)
        if found is None:
            assert terms.spot is not None, "only spot classes have a spot price"
            idle = self._idle_capacity(model, name)
            percent = spot_percent(idle, *terms.spot)
            interval_ms = round(self.interval_s * 1000)
            async with self._asking_store(), self.database.write() as session:
                unix_ms = await session.scalar(select(self.now()))
                assert unix_ms is not None
                found = await store.publish_price(session, model, name, unix_ms, interval_ms, percent, idle)
        if found is None:
            raise Unavailable(
                f"The spot price of {model!r} changes right now; try again shortly, or choose another service_tier.",
                code=PRICE_UNAVAILABLE,
                retry_after_s=1,
            )
        return _KnownPrice(SpotPrice.of(found), self.clock.monotonic() + (found.ends_ms - unix_ms) / 1000)

    def _idle_capacity(self, model: str, service_class: str) -> float:
        loads = [
            state.load
            for state in self.states()
            if state.card is not None and state.card.model == model and state.card.serves_spot
            if state.load is not None and state.load_is_fresh and state.can_take
        ]
        idle = idle_capacity(loads, service_class)
        if idle is None:
            raise Unavailable(
                f"No engine of {model!r} reports its load right now, so there is no spot price; try again shortly, or "
                "choose another service_tier.",
                code=PRICE_UNAVAILABLE,
                retry_after_s=1,
            )
        return idle
