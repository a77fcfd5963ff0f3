"""Spot prices over HTTP: the current ones for clients, and the published ones for administrators."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.access.views import READ_SPOT_PRICES
from moiety_platform.auth.client import AuthenticatedClient
from moiety_platform.auth.principal import Principal
from moiety_platform.classes.admin_resource import CLASSES
from moiety_platform.classes.cache import ClassCache
from moiety_platform.classes.terms import Catalogue
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.openapi.documents import ANTHROPIC_KEY, KEY
from moiety_platform.prices.token_cost import PriceList
from moiety_platform.request_rules.cache import RequestRulesCache
from moiety_platform.spot import store
from moiety_platform.spot.models import SpotPriceRecord
from moiety_platform.spot.service import SpotPrices
from moiety_platform.spot.terms import SpotPrice, moment, percent_of
from moiety_platform.time_span import TimeSpanDependency
from moiety_wire.shared_fields import copy_fields

MAX_LISTED = 2000


class SpotRates(msgspec.Struct, frozen=True):
    """Prices of a million tokens in nano-dollars, as a request that is admitted now pays them."""

    input_nanodollars: int
    cached_input_nanodollars: int
    output_nanodollars: int


class SpotOffer(msgspec.Struct, frozen=True):
    """Current price of a spot class for one model. `price` is null for a model without a price."""

    model: str
    service_class: str
    percent: int  # of the class's price
    floor_percent: int
    ceiling_percent: int
    idle_percent: int  # predicted idle capacity, from which the price was computed
    starts_at: datetime
    ends_at: datetime
    price: SpotRates | None


class SpotOffers(msgspec.Struct, frozen=True):
    """Current spot prices of the models that the key may use and whose engines report their load."""

    object: Literal["list"]
    data: list[SpotOffer]


class PublishedSpotPrice(msgspec.Struct, frozen=True):
    """Price of a spot class for one model in one interval."""

    model: str
    service_class: str
    percent: int
    idle_percent: int
    starts_at: datetime
    ends_at: datetime

    @classmethod
    def of(cls, record: SpotPriceRecord) -> PublishedSpotPrice:
        return copy_fields(record, cls, starts_at=moment(record.starts_ms), ends_at=moment(record.ends_ms))


class PublishedSpotPrices(msgspec.Struct, frozen=True):
    """Published spot prices, the newest first."""

    data: list[PublishedSpotPrice]


class SpotPriceController(Controller):
    """Route of current spot prices."""

    path = "/v1/spot-prices"
    tags = ("text",)
    security = [{KEY: list[str]()}, {ANTHROPIC_KEY: list[str]()}]  # noqa: RUF012  read by the framework only

    @get()
    async def list_spot_prices(
        self,
        owner: AuthenticatedClient,
        spot: NamedDependency[SkipValidation[SpotPrices]],
        spot_rules: NamedDependency[SkipValidation[RequestRulesCache]],
        spot_classes: NamedDependency[SkipValidation[ClassCache]],
    ) -> SpotOffers:
        """List the current price of each spot class, by model."""
        catalogue = await spot_classes.current()
        prices = (await spot_rules.current()).prices
        return SpotOffers("list", await _offers(owner, catalogue, prices, spot))


class SpotHistoryController(Controller):
    """Route of published spot prices."""

    path = "/spot-prices"
    tags = CLASSES.tags

    @get(opt=needs(READ_SPOT_PRICES))
    async def list_published_prices(
        self, database: NamedDependency[Database], period: TimeSpanDependency
    ) -> PublishedSpotPrices:
        """List the newest 2000 prices of spot classes that were published in a time span."""
        since, until = (round(one.timestamp() * 1000) for one in (period.since, period.until))
        async with database.read() as session:
            found = await store.list_prices(session, since, until, MAX_LISTED)
            return PublishedSpotPrices([PublishedSpotPrice.of(record) for record in found])


async def _offers(owner: Principal, catalogue: Catalogue, prices: PriceList, spot: SpotPrices) -> list[SpotOffer]:
    offers = []
    models = spot.models()
    for terms in catalogue.spot_classes:
        name = terms.service.name
        assert terms.spot is not None, "a spot class"
        for model in models:
            if owner.allowed_models is not None and model not in owner.allowed_models:
                continue
            try:
                found = await spot.price_of(terms, model)
            except Unavailable as error:
                if error.code != "spot_price_unavailable":
                    raise
                continue  # no engine of the model reports its load
            regular = prices.of(model, name, terms.price_factor)
            rates = None if regular is None else percent_of(regular, found.percent)
            shown = None if rates is None else SpotRates(rates.input, rates.cached_input, rates.output)
            offers.append(_offer(model, name, found, terms.spot, shown))
    return offers


def _offer(model: str, name: str, found: SpotPrice, bounds: tuple[int, int], price: SpotRates | None) -> SpotOffer:
    starts_at, ends_at = moment(found.starts_ms), moment(found.ends_ms)
    return SpotOffer(model, name, found.percent, *bounds, found.idle_percent, starts_at, ends_at, price)
