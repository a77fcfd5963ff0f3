"""Check the query string of every request against the parameters of its route.

A filter that a client misspells must fail, since an ignored filter returns the rows of everybody. The check runs for
each route of an application; a route declares its parameters by the signatures of its handler and of its dependencies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl

from litestar.connection import ASGIConnection
from litestar.enums import HttpMethod, ParamType
from litestar.handlers import BaseRouteHandler
from litestar.params import ParameterKwarg

from moiety_platform.errors import BadRequest
from moiety_platform.fast_path import DIRECT
from moiety_platform.handler_parameters import parameters_of

IGNORED = "ignored_query_parameters"  # key in a route's `opt`: names that clients send and that change nothing
SENT_BY_BETA_CLIENTS = frozenset({"beta"})  # the vendors' beta resources add ?beta=true to each path
MAX_SHOWN = 64  # characters of an unknown name in an error message


def query_names(handler: BaseRouteHandler) -> frozenset[str]:
    """Return the names of a handler's query parameters, as clients write them."""
    return frozenset(
        field.kwarg_definition.name or name
        for name, field in parameters_of(handler).items()
        if isinstance(field.kwarg_definition, ParameterKwarg)
        and not field.is_di_field
        and name != "request"
        and field.kwarg_definition.param_type is ParamType.QUERY
    )


async def guard_query(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Check a request's query string as a guard of the whole application. Raises BadRequest."""
    if DIRECT in handler.opt or connection.scope.get("method") == HttpMethod.OPTIONS:
        return  # direct routes check theirs after authentication; OPTIONS is answered by the framework
    query: bytes = connection.scope.get("query_string", b"")
    if query:
        check_query(query, query_names(handler), handler.opt.get(IGNORED, ()))


def check_query(query: bytes, known: Iterable[str], ignored: Iterable[str] = ()) -> None:
    """Raise BadRequest for a parameter that is unknown, is given twice or has no value. `ignored` names may occur."""
    names, unread = frozenset(known), frozenset(ignored)
    seen: set[str] = set()
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name in unread and name not in names:
            continue
        if name not in names:
            takes = f"it takes: {', '.join(sorted(names))}" if names else "it takes none"
            message = f"this route has no query parameter {name[:MAX_SHOWN]!r}; {takes}"
            raise BadRequest(message, code="unknown_query_parameter", param=name[:MAX_SHOWN])
        if name in seen:
            raise BadRequest(
                f"the query parameter '{name}' is given more than once; give it once",
                code="repeated_query_parameter",
                param=name,
            )
        if not value:
            raise BadRequest(
                f"the query parameter '{name}' has no value; give one, or leave the parameter out",
                code="empty_query_parameter",
                param=name,
            )
        seen.add(name)
