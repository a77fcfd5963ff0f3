"""`/admin/v1/routes`: maps HTTP to the service. The admin router decides on access."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody

from moiety_platform.access.actions import needs
from moiety_platform.controllers import RulesDependency
from moiety_platform.db.session import Database
from moiety_platform.etags import Precondition, tagged
from moiety_platform.model_routes import service
from moiety_platform.model_routes.admin_resource import ROUTES
from moiety_platform.model_routes.schemas import NewRoute, RouteView, RouteViews
from moiety_platform.openapi.described import fails


class RouteController(Controller):
    """Routes of models. A change applies to requests that begin later, at every gateway within seconds."""

    path = ROUTES.path
    tags = ROUTES.tags

    @get(opt=needs(ROUTES.read))
    async def list_routes(self, database: NamedDependency[Database]) -> RouteViews:
        """List all routes by name."""
        async with database.read() as session:
            return RouteViews([RouteView.of(route) for route in (await service.load_routes(session)).values()])

    @get("/one", opt=needs(ROUTES.read) | fails(404))
    async def get_route(self, database: NamedDependency[Database], route: FromQuery[str]) -> Response[RouteView]:
        """Return one route by its name."""
        async with database.read() as session:
            return tagged(RouteView.of(await service.get_route(session, route)))

    @put(opt=needs(ROUTES.write) | fails(409))
    async def set_route(
        self,
        rules: RulesDependency,
        precondition: NamedDependency[Precondition],
        data: JSONBody[NewRoute],
    ) -> Response[RouteView]:
        """Set or replace a route."""
        async with rules.write() as session:
            found = await service.find_route(session, data.name)
            precondition.check(None if found is None else RouteView.of(found))
            return tagged(RouteView.of(await service.set_route(session, data)))

    @delete(status_code=200, opt=needs(ROUTES.write) | fails(404))
    async def delete_route(
        self,
        rules: RulesDependency,
        precondition: NamedDependency[Precondition],
        route: FromQuery[str],
    ) -> RouteView:
        """Delete a route; returns its last state."""
        async with rules.write() as session:
            precondition.check(RouteView.of(await service.get_route(session, route)))
            return RouteView.of(await service.delete_route(session, route))
