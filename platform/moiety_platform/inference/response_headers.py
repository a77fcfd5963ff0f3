"""Response headers of inference requests. `RequestRecord.response_headers` returns all of a request."""

from __future__ import annotations

from urllib.parse import quote

CLASS_HEADER = "x-moiety-class"  # the class that is served
ADMISSION_HEADER = "x-moiety-admission"  # the reason code of the engine's verdict
ROUTE_HEADER = "x-moiety-route"  # the route that the client named
MODEL_HEADER = "x-moiety-model"  # the model of the route that answers
ESTIMATE_HEADER = "x-moiety-estimated-prompt-tokens"  # reserved for a prompt that only a hosted provider can count
IGNORED_HEADER = "x-moiety-ignored-fields"
ADJUSTED_HEADER = "x-moiety-adjusted-fields"
_MAX_NAMED = 32  # in a header


def route_headers(route: str, model: str) -> dict[str, str]:
    """Return the headers of a request for a route. Other characters than those of ASCII are percent-encoded."""
    return {ROUTE_HEADER: _encoded(route), MODEL_HEADER: _encoded(model)}


def field_headers(ignored_names: list[str], adjusted: dict[str, str]) -> dict[str, str]:
    """Return the headers that name ignored fields, and adjusted fields with the value that is used instead."""
    headers = {}
    if ignored_names:
        headers[IGNORED_HEADER] = ", ".join(sorted(ignored_names)[:_MAX_NAMED])
    if adjusted:
        headers[ADJUSTED_HEADER] = ", ".join(f"{name}={value}" for name, value in sorted(adjusted.items())[:_MAX_NAMED])
    return headers


def _encoded(name: str) -> str:
    return name if name.isascii() else quote(name, safe="/:@+ ")
