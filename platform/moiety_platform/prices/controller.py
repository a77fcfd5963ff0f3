"""/admin/v1/prices. Maps HTTP to the service; who may call is the router's affair."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody

from moiety_platform.access.table import AdminAction, needs
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.db.session import Database
from moiety_platform.etags import Precondition, tagged
from moiety_platform.openapi.described import fails
from moiety_platform.prices import service
from moiety_platform.prices.cache import PriceCache
from moiety_platform.prices.schemas import NewPrice, PriceView, PriceViews


class PriceController(Controller):
    """Prices by model and class. They hold for requests that begin after a change, at every gateway within seconds."""

    path = "/prices"
    tags = ("prices",)

    @get(opt=needs(AdminAction.READ_PRICES))
    async def list_prices(self, database: NamedDependency[Database]) -> PriceViews:
        """All prices, by model and class."""
        async with database.read() as session:
            return PriceViews([PriceView.of(record) for record in await service.list_prices(session)])

    @get("/one", opt=needs(AdminAction.READ_PRICES) | fails(404))
    async def get_price(
        self,
        database: NamedDependency[Database],
        model: FromQuery[str],
        service_class: FromQuery[str | None] = None,
    ) -> Response[PriceView]:
        """One price; without `service_class`, the one that holds for every class that has none of its own."""
        async with database.read() as session:
            return tagged(PriceView.of(await service.get_price(session, model, service_class)))

    @put(opt=needs(AdminAction.WRITE_PRICES) | fails(409))
    async def set_price(
        self,
        store: NamedDependency[AuditedStore],
        prices: NamedDependency[PriceCache],
        precondition: NamedDependency[Precondition],
        data: JSONBody[NewPrice],
    ) -> Response[PriceView]:
        """Set a price, or change it."""
        async with store.write() as session:
            record = await service.find_price(session, data.model, data.service_class)
            precondition.check(None if record is None else PriceView.of(record))
            view = PriceView.of(await service.set_price(session, data))
        prices.forget()
        return tagged(view)

    @delete(status_code=200, opt=needs(AdminAction.WRITE_PRICES) | fails(404))
    async def delete_price(
        self,
        store: NamedDependency[AuditedStore],
        prices: NamedDependency[PriceCache],
        precondition: NamedDependency[Precondition],
        model: FromQuery[str],
        service_class: FromQuery[str | None] = None,
    ) -> PriceView:
        """Take a price away; returns what it was."""
        async with store.write() as session:
            precondition.check(PriceView.of(await service.get_price(session, model, service_class)))
            view = PriceView.of(await service.delete_price(session, model, service_class))
        prices.forget()
        return view
