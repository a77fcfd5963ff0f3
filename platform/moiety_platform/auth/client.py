"""Authentication of client endpoints that send no request to an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from litestar import Request
from litestar.di import NamedDependency, Provide
from litestar.params import SkipValidation

from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.principal import INFERENCE_SCOPE, Principal, require_scope
from moiety_platform.request_head import bearer_authorization, fields_of

AuthenticatedClient = NamedDependency[SkipValidation[Principal]]
"""A handler's argument `owner`, which `owner_of_request` provides."""


def owner_of_request(
    authenticator: Authenticator,
    authorization: Callable[[Mapping[bytes, bytes]], str | None] = bearer_authorization,
) -> Provide:
    """Return the provider of the caller, who owns what the request reads and makes.

    It raises what `authenticate` raises.
    """

    async def owner(request: Request[Any, Any, Any]) -> Principal:
        return await authenticate(authenticator, request, authorization)

    return Provide(owner)


async def authenticate(
    authenticator: Authenticator,
    request: Request[Any, Any, Any],
    authorization: Callable[[Mapping[bytes, bytes]], str | None] = bearer_authorization,
) -> Principal:
    """Return the caller, who may use models. `authorization` reads the credentials from the header fields.

    Raises Unauthenticated, Forbidden or Unavailable.
    """
    principal = await authenticator.authenticate(authorization(fields_of(request.scope)))
    require_scope(principal, INFERENCE_SCOPE)
    return principal
