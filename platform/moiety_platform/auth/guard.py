"""Guard of the admin API: a Litestar guard that admits only callers who may perform the route's action."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from litestar.connection import ASGIConnection
from litestar.enums import HttpMethod
from litestar.handlers import BaseRouteHandler

from moiety_platform.access.actions import ACTION, AdminAction
from moiety_platform.access.caller import Caller
from moiety_platform.access.views import ACCEPT_INVITATION
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.keys import PREFIX
from moiety_platform.auth.principal import Principal
from moiety_platform.auth.users.sign_in import TENANT_HEADER
from moiety_platform.errors import Forbidden, Unauthenticated

if TYPE_CHECKING:
    from moiety_platform.auth.oidc import OidcVerifier

AsyncGuard = Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], Awaitable[None]]


class UnguardedRoute(Exception):
    """A defect in the code: a route of the admin API names no action."""


FindVerifier = Callable[[], "OidcVerifier | None"]


def admin_guard(authenticator: Authenticator, oidc: FindVerifier = lambda: None) -> AsyncGuard:
    """Return a guard that stores the caller in `connection.state.caller`.

    Where `oidc` finds a verifier, a bearer credential that is not one of our keys counts as a token. The guard raises
    Unauthenticated, Forbidden or Unavailable.
    """

    async def guard(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        authorization = connection.headers.get("authorization")
        scheme, _, token = (authorization or "").partition(" ")
        verifier = oidc()
        is_token = scheme.lower() == "bearer" and not token.strip().startswith(PREFIX)
        accepts_invitation = handler.opt.get(ACTION) is ACCEPT_INVITATION
        if verifier is not None and is_token and accepts_invitation:
            connection.state.subject = await verifier.identify(token.strip())
            return
        if verifier is not None and is_token:
            caller = await verifier.authenticate(token.strip(), connection.headers.get(TENANT_HEADER))
        else:
            caller = caller_of(await authenticator.authenticate(authorization))
        if connection.scope.get("method") != HttpMethod.OPTIONS:  # the framework's own, which lists a path's methods
            if accepts_invitation:
                raise _sign_in_needed()
            caller.require(action_of(handler))
        connection.state.caller = caller

    return guard


def _sign_in_needed() -> Unauthenticated:
    return Unauthenticated(
        "An invitation is accepted with a token of the identity provider. Sign in to the dashboard through it; the "
        "gateway needs MOIETY_OIDC_ISSUER.",
        code="sign_in_required",
    )


def action_of(handler: BaseRouteHandler) -> AdminAction:
    """Return the action of a route. Raises UnguardedRoute."""
    action = handler.opt.get(ACTION)
    if not isinstance(action, AdminAction):
        raise UnguardedRoute(f"{handler} names no action; give it opt=needs(…) of access/actions.py")
    return action


def caller_of(principal: Principal) -> Caller:
    """Return the administrator of a key. Raises Forbidden for a key without a role."""
    if principal.role is None:
        raise Forbidden(
            "This endpoint is for administrators, and this key has no role; use an administrator's key.",
            code="missing_scope",
        )
    return Caller(principal.key_id, principal.role, principal.tenant_id or None)
