"""The admin API as one router: every route of it behind the administrators' door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Request, Router
from litestar.di import Provide
from litestar.types import ControllerRouterHandler

from moiety_platform.audit.controller import AuditController
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.controller import KeyController
from moiety_platform.auth.guard import scope_guard
from moiety_platform.auth.overview import OverviewController
from moiety_platform.auth.pepper import Pepper
from moiety_platform.auth.scopes import ADMIN_SCOPE
from moiety_platform.classes.cache import ClassCache
from moiety_platform.classes.controller import ClassController
from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.etags import Precondition
from moiety_platform.idempotency.controller import IdempotencyController
from moiety_platform.json_depth import check_depth
from moiety_platform.prices.cache import PriceCache
from moiety_platform.prices.controller import PriceController
from moiety_platform.quota.controller import QuotaController
from moiety_platform.quota.keeper import QuotaKeeper
from moiety_platform.tenants.controller import ProjectController, TenantController
from moiety_platform.usage.controller import UsageController

ADMIN_PATH = "/admin/v1"
MAX_JSON_DEPTH = 16  # no body of ours needs more than two


def admin_router(
    database: Database,
    authenticator: Authenticator,
    classes: ClassCache,
    prices: PriceCache,
    quotas: QuotaKeeper,
    pepper: bytes,
    clock: Clock,
    *,
    more: Sequence[ControllerRouterHandler] = (),
) -> Router:
    """Routes under /admin/v1 for keys with the scope `admin`; `more` are handlers that others add behind the same
    door."""
    wrapped = Pepper(pepper)

    def store(request: Request[Any, Any, Any]) -> AuditedStore:
        return AuditedStore(database, request.state.principal.key_id, clock)

    return Router(
        path=ADMIN_PATH,
        guards=[scope_guard(authenticator, ADMIN_SCOPE)],
        before_request=_check_body,
        dependencies={
            "database": Provide(lambda: database, sync_to_thread=False),
            "store": Provide(store, sync_to_thread=False),
            "precondition": Provide(_precondition, sync_to_thread=False),
            "authenticator": Provide(lambda: authenticator, sync_to_thread=False),
            "classes": Provide(lambda: classes, sync_to_thread=False),
            "prices": Provide(lambda: prices, sync_to_thread=False),
            "quotas": Provide(lambda: quotas, sync_to_thread=False),
            "pepper": Provide(lambda: wrapped, sync_to_thread=False),
            "clock": Provide(lambda: clock, sync_to_thread=False),
        },
        route_handlers=[
            AuditController,
            ClassController,
            TenantController,
            IdempotencyController,
            ProjectController,
            KeyController,
            PriceController,
            QuotaController,
            UsageController,
            OverviewController,
            *more,
        ],
    )


def _precondition(request: Request[Any, Any, Any]) -> Precondition:
    given = request.headers.getall("if-match", [])
    return Precondition(", ".join(given) if given else None)


async def _check_body(request: Request[Any, Any, Any]) -> None:
    """Raises BadRequest for JSON that would exhaust the framework's decoder. The body is kept for the handler."""
    check_depth(await request.body(), MAX_JSON_DEPTH)
