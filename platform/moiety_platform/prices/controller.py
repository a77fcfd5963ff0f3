"""`/admin/v1/prices`: maps HTTP to the service. The admin router decides on access."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody

from moiety_platform.access.actions import needs
from moiety_platform.controllers import RulesDependency
from moiety_platform.db.session import Database
from moiety_platform.etags import Precondition, tagged
from moiety_platform.openapi.described import fails
from moiety_platform.prices import service
from moiety_platform.prices.admin_resource import PRICES
from moiety_platform.prices.schemas import NewPrice, PriceView, PriceViews


class PriceController(Controller):
    """Routes of prices by model and class.

    A price applies to requests that begin after a change, at every gateway within seconds.
    """

    path = PRICES.path
    tags = PRICES.tags

    @get(opt=needs(PRICES.read))
    async def list_prices(self, database: NamedDependency[Database]) -> PriceViews:
        """List all prices by model and class."""
        async with database.read() as session:
            return PriceViews([PriceView.of(record) for record in await service.list_prices(session)])

    @get("/one", opt=needs(PRICES.read) | fails(404))
    async def get_price(
        self,
        database: NamedDependency[Database],
        model: FromQuery[str],
        service_class: FromQuery[str | None] = None,
    ) -> Response[PriceView]:
        """Return one price; without `service_class`, the price for every class without a price of its own."""
        async with database.read() as session:
            return tagged(PriceView.of(await service.get_price(session, model, service_class)))

    @put(opt=needs(PRICES.write) | fails(409))
    async def set_price(
        self,
        rules: RulesDependency,
        precondition: NamedDependency[Precondition],
        data: JSONBody[NewPrice],
    ) -> Response[PriceView]:
        """Set or change a price."""
        async with rules.write() as session:
            record = await service.find_price(session, data.model, data.service_class)
            precondition.check(None if record is None else PriceView.of(record))
            return tagged(PriceView.of(await service.set_price(session, data)))

    @delete(status_code=200, opt=needs(PRICES.write) | fails(404))
    async def delete_price(
        self,
        rules: RulesDependency,
        precondition: NamedDependency[Precondition],
        model: FromQuery[str],
        service_class: FromQuery[str | None] = None,
    ) -> PriceView:
        """Delete a price; returns its last state."""
        async with rules.write() as session:
            precondition.check(PriceView.of(await service.get_price(session, model, service_class)))
            return PriceView.of(await service.delete_price(session, model, service_class))
