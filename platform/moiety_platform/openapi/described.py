"""OpenAPI metadata of a route beyond its handler's signature. Pure.

Path and query parameters, a JSON body and the answer come from the handler's signature, the summary from its docstring.
The rest is in its `opt`, set by `describes`. Errors common to all routes of a kind (401, 503 …) are added when the
document is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from moiety_platform.http_errors import ErrorBody

DESCRIPTION = "openapi"  # key in a route's `opt`

JSON = "application/json"
EVENTS = "text/event-stream"

Contents = Mapping[str, Any]
"""Content by media type: a type, or a JSON schema where there is no type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """OpenAPI metadata of a route.

    `error` is the type of every error answer. `answers` replace the answer of the signature and may be empty. `errors`
    are statuses in addition to those of every such route.
    """

    error: type = ErrorBody
    body: Contents = field(default_factory=dict)
    answers: Mapping[int, Contents] | None = None
    errors: tuple[int, ...] = ()
    request_headers: tuple[str, ...] = ()  # names of `headers.REQUEST`
    answer_headers: tuple[str, ...] = ()  # names of `headers.ANSWER`, for every successful answer

    def __deepcopy__(self, _memo: dict[int, object]) -> Self:
        """Return the metadata itself, which is immutable: the framework copies each handler with its `opt`."""
        return self


def describes(described: Described) -> dict[str, Described]:
    """Return the metadata as entries of a route's `opt`."""
    return {DESCRIPTION: described}


def fails(*statuses: int) -> dict[str, Described]:
    """Return entries of a route's `opt` that add only error statuses."""
    return describes(Described(errors=statuses))


def event_of(*payloads: Any, name: str | None = None, last: str | None = None) -> dict[str, Any]:
    """Return the schema of a stream's server-sent events.

    Their `data` is one of `payloads` as JSON, or the text `last`. Types among the payloads become references.
    """
    data: list[dict[str, Any]] = [
        {"type": "string", "contentMediaType": JSON, "contentSchema": payload} for payload in payloads
    ]
    if last is not None:
        data.append({"const": last})
    properties: dict[str, Any] = {"data": data[0] if len(data) == 1 else {"anyOf": data}}
    if name is not None:
        properties["event"] = {"const": name}
    return {"type": "object", "properties": properties, "required": list(properties)}
