"""OpenAPI documents of the inference API, of the administration API, and of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from typing import Any

from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from moiety_platform.openapi import headers
from moiety_platform.openapi.operations import operation_of
from moiety_platform.openapi.schemas import Schemas

OPENAPI_VERSION = "3.1.0"
ADMIN_PREFIX = "/admin/"

KEY = "key"
ANTHROPIC_KEY = "anthropic_key"
ADMIN_KEY = "admin_key"
"""Authentication schemes: names in `_SECURITY`, for a route's `security`."""

_SECURITY: Mapping[str, Any] = {
    KEY: {"type": "http", "scheme": "bearer", "description": "A key of a project, with the scope `inference`."},
    ANTHROPIC_KEY: {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The same key, in the header of Anthropic's clients.",
    },
    ADMIN_KEY: {
        "type": "http",
        "scheme": "bearer",
        "description": "An administrator's key, or a token of the identity provider that the gateway is configured "
        "with.",
    },
}

_ABOUT = (
    "Errors have the form of the API that is asked, with a stable `code`. What is no HTTP is answered 400 `bad_http`, "
    "an unknown path 404 `route_not_found`, an endpoint of OpenAI's that is not served 404 `endpoint_not_supported`, a "
    "method that a path does not have 405 with `Allow`. A defect of ours is a "
    "500 of the same form, without detail. Every answer has `x-request-id`."
)


class DocumentPart(StrEnum):
    """The routes of a document."""

    PUBLIC = "public"
    ADMIN = "admin"
    ALL = "openapi"

    def has(self, path: str) -> bool:
        return self is DocumentPart.ALL or path.startswith(ADMIN_PREFIX) == (self is DocumentPart.ADMIN)


_TITLES = {
    DocumentPart.PUBLIC: "Moiety",
    DocumentPart.ADMIN: "Moiety administration",
    DocumentPart.ALL: "Moiety, with its administration",
}


@dataclass(slots=True)
class Documents:
    """Documents of one application, built on first use and again after `settings` change.

    `settings` returns the limits on request bodies.
    """

    settings: Callable[[], Any]
    _made: dict[DocumentPart, tuple[Any, dict[str, Any]]] = field(default_factory=dict)

    def get(self, app: Litestar, part: DocumentPart) -> dict[str, Any]:
        """Return the document, ready for JSON encoding."""
        settings = self.settings()
        made_for, document = self._made.get(part, (None, {}))
        if made_for != settings:
            document = make_document(app, part, settings)
            self._made[part] = settings, document
        return document


def make_document(app: Litestar, part: DocumentPart, settings: Any) -> dict[str, Any]:
    """Build a document. Raises NameTaken."""
    schemas, responses, paths = Schemas(settings), dict[str, Any](), dict[str, Any]()
    for path, method, handler in sorted(_shown(app), key=lambda one: one[:2]):
        if part.has(path):
            paths.setdefault(path, {})[method] = operation_of(handler, schemas, responses)
    operations = [operation for item in paths.values() for operation in item.values()]
    used = {name for operation in operations for one in operation.get("security", ()) for name in one}
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": _TITLES[part], "version": version("moiety"), "description": _ABOUT},
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in sorted({tag for one in operations for tag in one["tags"]})],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": responses,
            "headers": headers.components(),
            "securitySchemes": {name: scheme for name, scheme in _SECURITY.items() if name in used},
        },
    }


def _shown(app: Litestar) -> Iterator[tuple[str, str, HTTPRouteHandler]]:
    """Yield path, method and handler of every operation."""
    for route in app.routes:
        if not isinstance(route, HTTPRoute):
            continue
        for method, (handler, _) in route.route_handler_map.items():
            if method != "OPTIONS" and handler.resolve_include_in_schema():
                yield route.path_format, method.lower(), handler
