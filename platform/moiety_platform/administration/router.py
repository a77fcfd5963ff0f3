"""The admin API as one router.

Every route is behind the administrators' guard, and its store is restricted to the objects that the caller may reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from litestar import Litestar, Request, Response
from litestar.di import NamedDependency, Provide
from litestar.params import SkipValidation
from litestar.routes import HTTPRoute
from litestar.types import ControllerRouterHandler
from sqlalchemy.exc import IntegrityError, StatementError

from moiety_platform.access.caller import Caller
from moiety_platform.administration.catalog import ACTIONS, RESOURCES
from moiety_platform.audit.controller import AuditController
from moiety_platform.audit.rule_changes import RuleChanges
from moiety_platform.audit.trail import AuditedStore, DryRunPassed
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.controller import KeyController
from moiety_platform.auth.guard import FindVerifier, action_of, admin_guard
from moiety_platform.auth.key_policies.controller import KeyPolicyController
from moiety_platform.auth.overview import CallerController, OverviewController
from moiety_platform.auth.pepper import Pepper
from moiety_platform.auth.row_scope import check_tables, scoped_database, tenant_of
from moiety_platform.auth.self_service.controller import SelfServiceController
from moiety_platform.auth.users.controller import InvitationController, UserController
from moiety_platform.auth.users.sign_in import Membership, TokenSubject, memberships_of_user
from moiety_platform.batches.administration import BatchAdminController
from moiety_platform.classes.cache import ClassCache
from moiety_platform.classes.controller import ClassController
from moiety_platform.clock import Clock
from moiety_platform.controllers import UncopiedRouter
from moiety_platform.db.failures import is_bad_value
from moiety_platform.db.paging import parse_page
from moiety_platform.db.session import Database
from moiety_platform.declarative_config.controller import DeclarationController
from moiety_platform.errors import BadRequest, Conflict
from moiety_platform.etags import PRECONDITION, Precondition
from moiety_platform.http_errors import answer_platform_error, answer_unexpected_error
from moiety_platform.idempotency.controller import IdempotencyController
from moiety_platform.json_depth import check_depth
from moiety_platform.model_routes.controller import RouteController
from moiety_platform.openapi.documents import ADMIN_KEY
from moiety_platform.prices.controller import PriceController
from moiety_platform.quota.controller import QuotaController
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.request_log.controller import RequestLogController
from moiety_platform.request_rules.cache import RequestRulesCache
from moiety_platform.spend.controller import SpendController
from moiety_platform.spot.controller import SpotHistoryController
from moiety_platform.tenants.controller import ProjectController, TenantController
from moiety_platform.time_span import parse_time_span
from moiety_platform.trace_store.controller import TraceController
from moiety_platform.usage.controller import UsageController
from moiety_platform.usage.quarantined_rows import QuarantinedUsage

ADMIN_PATH = "/admin/v1"
DRY_RUN = "x-moiety-dry-run"
DRY_RUN_METHODS = ("POST", "PUT", "PATCH")
MAX_JSON_DEPTH = 16  # no body of ours needs more than two

CONTROLLERS: tuple[ControllerRouterHandler, ...] = (
    AuditController,
    ClassController,
    SpotHistoryController,
    TenantController,
    IdempotencyController,
    ProjectController,
    KeyController,
    UserController,
    InvitationController,
    KeyPolicyController,
    SelfServiceController,
    PriceController,
    RouteController,
    QuotaController,
    UsageController,
    SpendController,
    RequestLogController,
    OverviewController,
    CallerController,
    TraceController,
    DeclarationController,
    BatchAdminController,
)


def admin_router(
    database: Database,
    authenticator: Authenticator,
    classes: ClassCache,
    rules: RequestRulesCache,
    quotas: QuotaEnforcer,
    pepper: bytes,
    clock: Clock,
    *,
    oidc: FindVerifier = lambda: None,
    traces: Database | None = None,
    quarantined_usage: QuarantinedUsage | None = None,
    more: Sequence[ControllerRouterHandler] = (),
) -> UncopiedRouter:
    """Return the routes under /admin/v1.

    `more` are further handlers behind the same guard. Each route names its action (see access/actions.py). `traces` is
    the trace store, if it is another database; `quarantined_usage` is usage that is not billed.
    """
    wrapped = Pepper(pepper)
    check_tables()  # reports a table without a tenant now, and not at the first request of a tenant's administrator

    def caller(request: Request[Any, Any, Any]) -> Caller:
        found: Caller = request.state.caller
        return found

    def reached(request: Request[Any, Any, Any]) -> Database:
        return scoped_database(caller(request), database)

    def traces_reached(request: Request[Any, Any, Any]) -> Database:
        return scoped_database(caller(request), traces or database)

    def store(request: Request[Any, Any, Any]) -> AuditedStore:
        who = caller(request)
        is_dry_run = DRY_RUN in request.headers  # _check_dry_run has checked its value
        return AuditedStore(scoped_database(who, database), who.actor, who.role, tenant_of, clock, is_dry_run)

    def subject_of(request: Request[Any, Any, Any]) -> TokenSubject:
        found: TokenSubject = request.state.subject
        return found

    def subject_store(request: Request[Any, Any, Any]) -> AuditedStore:
        return AuditedStore(database, subject_of(request).actor, None, tenant_of, clock)

    async def memberships(request: Request[Any, Any, Any]) -> list[Membership]:
        return await memberships_of_user(database, caller(request).user_id)

    def rule_changes(store: NamedDependency[SkipValidation[AuditedStore]]) -> RuleChanges:
        return RuleChanges(store, rules)

    def now() -> datetime:
        return clock.now()

    return UncopiedRouter(
        path=ADMIN_PATH,
        guards=[admin_guard(authenticator, oidc)],
        security=[{ADMIN_KEY: []}],
        before_request=_check_request,
        exception_handlers={
            **dict.fromkeys((StatementError, OverflowError, UnicodeEncodeError), _answer_store_error),
            DryRunPassed: _answer_dry_run,
        },
        dependencies={
            "caller": Provide(caller, sync_to_thread=False),
            "database": Provide(reached, sync_to_thread=False),
            "store": Provide(store, sync_to_thread=False),
            "subject": Provide(subject_of, sync_to_thread=False),
            "subject_store": Provide(subject_store, sync_to_thread=False),
            "memberships": Provide(memberships),
            "traces": Provide(traces_reached, sync_to_thread=False),
            PRECONDITION: Provide(_precondition, sync_to_thread=False),
            "authenticator": Provide(lambda: authenticator, sync_to_thread=False),
            "classes": Provide(lambda: classes, sync_to_thread=False),
            "rules": Provide(rule_changes, sync_to_thread=False),
            "quotas": Provide(lambda: quotas, sync_to_thread=False),
            "pepper": Provide(lambda: wrapped, sync_to_thread=False),
            "now": Provide(now, sync_to_thread=False),
            "page": Provide(parse_page, sync_to_thread=False),
            "period": Provide(parse_time_span, sync_to_thread=False),
            "actions": Provide(lambda: ACTIONS, sync_to_thread=False),
            "quarantined_usage": Provide(lambda: quarantined_usage, sync_to_thread=False),
        },
        route_handlers=[*CONTROLLERS, *more],
    )


def check_actions(app: Litestar) -> None:
    """Check that every route of the admin API names its action. Raises UnguardedRoute."""
    for route in app.routes:
        if isinstance(route, HTTPRoute) and route.path.startswith(ADMIN_PATH):
            for method, (handler, _) in route.route_handler_map.items():
                if method != "OPTIONS":  # the framework's own, which only list the methods of a path
                    action_of(handler)


def _precondition(request: Request[Any, Any, Any]) -> Precondition:
    given = request.headers.getall("if-match", [])
    return Precondition(", ".join(given) if given else None, request.headers.get("if-none-match"))


def _answer_store_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Answer a store error that no handler foresaw.

    Causes: a value that the store cannot hold, or a row that contradicts another one. Drivers raise some encoding
    errors unwrapped.
    """
    if is_bad_value(error):
        message = (
            "a value of this request cannot be stored: send text without NUL, and numbers and moments within range"
        )
        return answer_platform_error(request, BadRequest(message, code="invalid_value"))
    if isinstance(error, IntegrityError):
        message = (
            "this conflicts with the present state or with a concurrent change: read the object again, then repeat "
            "the request"
        )
        return answer_platform_error(request, Conflict(message, code="conflicting_change"))
    return answer_unexpected_error(request, error)


async def _check_request(request: Request[Any, Any, Any]) -> None:
    """Check the body and the header for a dry run. Raises BadRequest."""
    _check_dry_run(request)
    await _check_body(request)


def _check_dry_run(request: Request[Any, Any, Any]) -> None:
    """Refuse a dry run where it would have an effect: of all but the creation or change of a declarable object."""
    given = request.headers.get(DRY_RUN)
    if given is None:
        return
    if given != "true":
        raise BadRequest(f"the header {DRY_RUN} must be 'true', or left out", code="invalid_dry_run")
    collection, *segments = request.scope["path"].removeprefix(ADMIN_PATH).strip("/").split("/")
    declarable = {one.collection for one in RESOURCES if one.apply_kind}
    if request.method not in DRY_RUN_METHODS or collection not in declarable or len(segments) > 1:
        raise BadRequest(
            f"{request.method} of this path has no dry run: leave the header {DRY_RUN} out", code="invalid_dry_run"
        )


def _answer_dry_run(_: Request[Any, Any, Any], __: Exception) -> Response[None]:
    return Response(None, status_code=204)


async def _check_body(request: Request[Any, Any, Any]) -> None:
    """Check the JSON body. Raises BadRequest.

    Refuses JSON that would exhaust the framework's decoder, and JSON of the wrong types: the framework would accept "5"
    for 5. The body remains available to the handler.
    """
    body = await request.body()
    check_depth(body, MAX_JSON_DEPTH)
    data = request.route_handler.parsed_fn_signature.parameters.get("data")
    if data is None:
        return
    try:
        msgspec.json.decode(body or b"null", type=data.annotation)
    except msgspec.ValidationError as exc:
        complaint, _, place = str(exc).partition(" - at `$.")
        field = place.rstrip("`")
        said = f"{complaint[:1].lower()}{complaint[1:]}"
        raise BadRequest(f"'{field}': {said}" if field else f"the body: {said}", param=field or None) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        message = f"the body is not valid JSON ({exc}); send one JSON object in UTF-8"
        raise BadRequest(message, code="invalid_json") from exc
