"""Builds the OpenAPI operation of a handler."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from inspect import cleandoc
from typing import Any, get_args

from litestar.enums import ParamType
from litestar.handlers import HTTPRouteHandler
from litestar.params import BodyKwarg, ParameterKwarg
from litestar.response import Response
from litestar.typing import FieldDefinition

from moiety_platform.etags import PRECONDITION, Tagged
from moiety_platform.handler_parameters import parameters_of
from moiety_platform.openapi import headers
from moiety_platform.openapi.described import DESCRIPTION, JSON, Contents, Described
from moiety_platform.openapi.schemas import Schemas

_WHY = {
    400: "The request is invalid; `message` says what to change.",
    401: "The API key is missing or invalid.",
    403: "The API key is valid, but does not permit this request.",
    404: "The object does not exist, or this key cannot access it.",
    408: "The request did not arrive in time.",
    409: "The request conflicts with the current state or with a running operation.",
    410: "The object existed, and is no longer stored.",
    412: "The object's ETag does not match `If-Match`; nothing was changed.",
    413: "The body is larger than this server accepts.",
    422: "The request conflicts with an earlier request.",
    429: "A limit is reached; try again after `Retry-After`.",
    431: "The request's line and headers are larger than this server accepts.",
    502: "The engine ended the request early.",
    503: "No engine or no database is available; try again after `Retry-After`.",
    507: "There is no space left for files; nothing was stored.",
    529: "The server is overloaded; try again after `Retry-After`.",
}
_WITH_RETRY = (429, 503, 529)
_BEFORE_THE_ROUTE = (408, 431)  # answered before the request has an id


def operation_of(handler: HTTPRouteHandler, schemas: Schemas, responses: dict[str, Any]) -> dict[str, Any]:
    """Return the operation. Shared error answers are added to `responses`."""
    described: Described = handler.opt.get(DESCRIPTION) or Described()
    fields = handler.parsed_fn_signature.parameters
    parameters = [*_parameters(parameters_of(handler), schemas), *_header_parameters(described, fields)]
    body = _body(described, fields, schemas)
    security = handler.resolve_security()
    summary, detail = _words(handler)
    operation: dict[str, Any] = {
        "operationId": operation_id_of(handler),
        "tags": list(handler.resolve_tags()),
        "summary": summary,
        "responses": {
            **{str(status): answer for status, answer in _answers(handler, described, schemas)},
            **_errors(described, _error_statuses(described, parameters, body, bool(security)), schemas, responses),
        },
    }
    if detail:
        operation["description"] = detail
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = body
    if security:
        operation["security"] = security
    return operation


def operation_id_of(handler: HTTPRouteHandler) -> str:
    """Return the handler's name. A name that is a path is converted to words.

    A path without a version is another name of one with it, whose operation has the plain name.
    """
    name = handler.name or handler.handler_name
    if name.startswith("/") and not re.match(r"/v\d", name):
        name = f"unversioned{name}"
    return re.sub(r"\W+", "_", name.removeprefix("/v1/").strip("/"))


def _words(handler: HTTPRouteHandler) -> tuple[str, str]:
    """Return summary and description: the first sentence of the docstring, and the rest."""
    text = " ".join(cleandoc(handler.description or handler.fn.__doc__ or "").split())
    if handler.summary:
        return handler.summary, text
    first, _, rest = text.partition(". ")
    first = first.rstrip(".")
    head, semicolon, tail = first.partition("; ")
    return head, " ".join(part for part in (f"{first}." if semicolon and tail else "", rest) if part)


def _parameters(fields: Mapping[str, FieldDefinition], schemas: Schemas) -> Iterator[dict[str, Any]]:
    for name, field in fields.items():
        kwarg = field.kwarg_definition
        if not isinstance(kwarg, ParameterKwarg) or field.is_di_field or name == "request":
            continue
        is_path = kwarg.param_type is ParamType.PATH
        annotation = field.annotation
        choices = [one for one in get_args(annotation) if one is not type(None)] if field.is_optional else [annotation]
        parameter: dict[str, Any] = {
            "name": kwarg.name or name,
            "in": "path" if is_path else "query",
            "required": is_path or field.is_required,
            "schema": schemas.of(choices[0]) | (kwarg.schema_extra or {}),
        }
        if parameter["schema"].get("type") == "string" and not {"enum", "format"} & set(parameter["schema"]):
            parameter["schema"].setdefault("minLength", 1)
        if parameter["schema"].get("type") == "array":
            parameter |= {"style": "form", "explode": False}
        if kwarg.description:
            parameter["description"] = kwarg.description
        yield parameter


def _header_parameters(described: Described, fields: Mapping[str, FieldDefinition]) -> Iterator[dict[str, Any]]:
    for name in (*described.request_headers, *((headers.IF_MATCH,) if PRECONDITION in fields else ())):
        yield {"name": name, "in": "header", "required": False, **headers.REQUEST[name]}


def _body(described: Described, fields: Mapping[str, FieldDefinition], schemas: Schemas) -> dict[str, Any] | None:
    if described.body:
        return {"required": True, "content": _content(described.body, schemas)}
    data = fields.get("data")
    if data is None or not isinstance(data.kwarg_definition, BodyKwarg):
        return None
    return {"required": data.is_required, "content": _content({JSON: data.annotation}, schemas)}


def _content(contents: Contents, schemas: Schemas) -> dict[str, Any]:
    return {media_type: {"schema": schemas.of(what)} for media_type, what in contents.items()}


def _answers(handler: HTTPRouteHandler, described: Described, schemas: Schemas) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the answers that are not errors."""
    answers = {handler.status_code: _returned(handler)} if described.answers is None else described.answers
    names = (headers.REQUEST_ID, *described.answer_headers, *((headers.ETAG,) if _is_tagged(handler) else ()))
    for status, contents in answers.items():
        answer: dict[str, Any] = {
            "description": HTTPStatus(status).phrase,
            "headers": {name: headers.reference(name) for name in names},
        }
        if contents:
            answer["content"] = _content(contents, schemas)
        yield status, answer


def _returned(handler: HTTPRouteHandler) -> Contents:
    returned = handler.parsed_fn_signature.return_type
    if returned.is_subclass_of(Response):
        returned = returned.inner_types[0]
    return {} if returned.annotation is type(None) else {JSON: returned.annotation}


def _is_tagged(handler: HTTPRouteHandler) -> bool:
    returned = handler.parsed_fn_signature.return_type
    return returned.is_subclass_of(Response) and any(one.is_subclass_of(Tagged) for one in returned.inner_types)


def _error_statuses(
    described: Described, parameters: list[dict[str, Any]], body: dict[str, Any] | None, is_secured: bool
) -> set[int]:
    """Return the error statuses of every route of this kind."""
    statuses = {*described.errors, 431}
    where = {parameter["in"] for parameter in parameters}
    if is_secured:
        statuses |= {401, 403, 503}
    if body is not None or where & {"query", "header"}:
        statuses.add(400)
    if body is not None:
        statuses |= {408, 413}
    if "path" in where:
        statuses.add(404)
    if any(parameter["name"] == headers.IF_MATCH for parameter in parameters):
        statuses.add(412)
    return statuses


def _errors(described: Described, statuses: set[int], schemas: Schemas, responses: dict[str, Any]) -> dict[str, Any]:
    """Return references to the error answers, which all routes with the same error type share."""
    form = described.error
    for status in statuses:
        responses[f"{form.__name__}{status}"] = {
            "description": _WHY[status],
            "headers": {name: headers.reference(name) for name in _error_headers(status)},
            "content": {JSON: {"schema": schemas.of(form)}},
        }
    return {str(status): {"$ref": f"#/components/responses/{form.__name__}{status}"} for status in sorted(statuses)}


def _error_headers(status: int) -> Iterator[str]:
    if status not in _BEFORE_THE_ROUTE:
        yield headers.REQUEST_ID
    if status in _WITH_RETRY:
        yield headers.RETRY_AFTER
    if status in (429, 529):
        yield headers.REASON
