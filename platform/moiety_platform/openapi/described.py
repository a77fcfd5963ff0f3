"""What a route says of itself beyond its handler's signature. Pure.

A handler's signature tells path and query parameters, a JSON body and the answer; its docstring the summary; its
`opt` has what is left, by `describes`. What every route of a kind may answer (401, 503 …) is added where the document
is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moiety_platform.http_errors import ErrorBody

DESCRIPTION = "openapi"  # its name in a route's `opt`

JSON = "application/json"
EVENTS = "text/event-stream"

Contents = Mapping[str, Any]
"""By media type: a type, or a JSON schema where there is no type for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """`error` is the type of every error answer. `answers` stand in place of what the signature says, and may be none;
    `errors` are the statuses beside those of every such route."""

    error: type = ErrorBody
    body: Contents = field(default_factory=dict)
    answers: Mapping[int, Contents] | None = None
    errors: tuple[int, ...] = ()
    request_headers: tuple[str, ...] = ()  # names of `headers.REQUEST`
    answer_headers: tuple[str, ...] = ()  # names of `headers.ANSWER`, of every answer that is no error


def describes(described: Described) -> dict[str, Described]:
    """For a route's `opt`."""
    return {DESCRIPTION: described}


def fails(*statuses: int) -> dict[str, Described]:
    """For the `opt` of a route of which the signature says all else."""
    return describes(Described(errors=statuses))


def event_of(*payloads: Any, name: str | None = None, last: str | None = None) -> dict[str, Any]:
    """The schema of each server-sent event of a stream, whose `data` is one of these as JSON, or the text `last`.
    Types among them become references."""
    data: list[dict[str, Any]] = [
        {"type": "string", "contentMediaType": JSON, "contentSchema": payload} for payload in payloads
    ]
    if last is not None:
        data.append({"const": last})
    properties: dict[str, Any] = {"data": data[0] if len(data) == 1 else {"anyOf": data}}
    if name is not None:
        properties["event"] = {"const": name}
    return {"type": "object", "properties": properties, "required": list(properties)}
