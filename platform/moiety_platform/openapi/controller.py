"""`/schema`: the OpenAPI documents as JSON and as HTML pages.

They need no API key and are therefore served where operators have access.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, get
from litestar.enums import MediaType
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.plugins import RedocRenderPlugin

from moiety_platform.http_errors import SCHEMA_PATH
from moiety_platform.openapi.documents import DocumentPart, Documents

MEDIA_TYPE = "application/vnd.oai.openapi+json"


def schema_routes(settings: Callable[[], Any], described: Litestar | None = None) -> list[HTTPRouteHandler]:
    """Return the handlers.

    `settings` returns the limits on request bodies. `described` is the application whose routes are documented, or None
    for the application that serves the documents.
    """
    documents = Documents(settings)

    def page_of(part: DocumentPart) -> HTTPRouteHandler:
        paths = [f"{SCHEMA_PATH}/{part}"] + ([SCHEMA_PATH] if part is DocumentPart.ALL else [])

        @get(paths, name=f"{part}_page", include_in_schema=False, media_type=MediaType.HTML, sync_to_thread=False)
        def page(request: Request[Any, Any, Any]) -> bytes:
            return RedocRenderPlugin().render(request, documents.get(described or request.app, part))

        return page

    def json_of(part: DocumentPart) -> HTTPRouteHandler:
        @get(f"{SCHEMA_PATH}/{part}.json", name=f"{part}_json", include_in_schema=False, sync_to_thread=False)
        def as_json(request: Request[Any, Any, Any]) -> Response[bytes]:
            return Response(msgspec.json.encode(documents.get(described or request.app, part)), media_type=MEDIA_TYPE)

        return as_json

    return [make(part) for part in DocumentPart for make in (page_of, json_of)]
