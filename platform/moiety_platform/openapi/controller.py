"""`/schema`: the OpenAPI documents as JSON and as HTML pages.

They need no API key and are therefore served where operators have access.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from litestar import Controller, Litestar, Request, Response, get
from litestar.di import NamedDependency
from litestar.enums import MediaType
from litestar.openapi.plugins import RedocRenderPlugin

from moiety_platform.http_errors import SCHEMA_PATH
from moiety_platform.openapi.documents import DocumentPart, Documents

MEDIA_TYPE = "application/vnd.oai.openapi+json"


class ServedDocuments:
    """Documents of one application, as pages and as JSON."""

    def __init__(self, settings: Callable[[], Any], described: Litestar | None = None) -> None:
        """Create it; `settings` returns the limits on request bodies.

        `described` is the application whose routes are documented, or None for the application that serves the
        documents.
        """
        self._documents, self._described = Documents(settings), described

    def page(self, request: Request[Any, Any, Any], part: DocumentPart) -> bytes:
        """Return the HTML page of a document."""
        return RedocRenderPlugin().render(request, self._documents.get(self._described or request.app, part))

    def json(self, request: Request[Any, Any, Any], part: DocumentPart) -> Response[bytes]:
        """Return a document as JSON."""
        document = self._documents.get(self._described or request.app, part)
        return Response(msgspec.json.encode(document), media_type=MEDIA_TYPE)


class SchemaController(Controller):
    """Routes of the documents."""

    path = SCHEMA_PATH

    @get(["/", "/openapi"], include_in_schema=False, media_type=MediaType.HTML, sync_to_thread=False)
    def openapi_page(self, served: NamedDependency[ServedDocuments], request: Request[Any, Any, Any]) -> bytes:
        """Return the page of all routes."""
        return served.page(request, DocumentPart.ALL)

    @get("/openapi.json", include_in_schema=False, sync_to_thread=False)
    def openapi_json(
        self, served: NamedDependency[ServedDocuments], request: Request[Any, Any, Any]
    ) -> Response[bytes]:
        """Return the document of all routes."""
        return served.json(request, DocumentPart.ALL)

    @get("/public", include_in_schema=False, media_type=MediaType.HTML, sync_to_thread=False)
    def public_page(self, served: NamedDependency[ServedDocuments], request: Request[Any, Any, Any]) -> bytes:
        """Return the page of the inference API."""
        return served.page(request, DocumentPart.PUBLIC)

    @get("/public.json", include_in_schema=False, sync_to_thread=False)
    def public_json(self, served: NamedDependency[ServedDocuments], request: Request[Any, Any, Any]) -> Response[bytes]:
        """Return the document of the inference API."""
        return served.json(request, DocumentPart.PUBLIC)

    @get("/admin", include_in_schema=False, media_type=MediaType.HTML, sync_to_thread=False)
    def admin_page(self, served: NamedDependency[ServedDocuments], request: Request[Any, Any, Any]) -> bytes:
        """Return the page of the administration API."""
        return served.page(request, DocumentPart.ADMIN)

    @get("/admin.json", include_in_schema=False, sync_to_thread=False)
    def admin_json(self, served: NamedDependency[ServedDocuments], request: Request[Any, Any, Any]) -> Response[bytes]:
        """Return the document of the administration API."""
        return served.json(request, DocumentPart.ADMIN)
