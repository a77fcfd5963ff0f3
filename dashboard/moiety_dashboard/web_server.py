"""The dashboard's web application: Streamlit's, with the security headers that OWASP lists and Streamlit does not send.

Streamlit's page needs inline styles, `eval` for its charts and a WebSocket to its own origin; everything else is
refused. The module knows none of our pages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from moiety_dashboard.browser_sessions import PATH, set_cookie

SECURITY_HEADERS: dict[str, str] = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
        "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class SecurityHeaders:
    """ASGI middleware that sets the headers on every answer, in place of the application's own."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._fields = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [
                    field for field in message.get("headers", ()) if field[0].decode().lower() not in SECURITY_HEADERS
                ]
                message["headers"] = [*own, *self._fields]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def create_web_app(script: Path) -> Any:
    """Return the application for Streamlit's runner."""
    from starlette.middleware import Middleware  # noqa: PLC0415  heavy, and only for those who run it
    from starlette.routing import Route  # noqa: PLC0415
    from streamlit.starlette import App  # noqa: PLC0415

    return App(str(script), routes=[Route(PATH, set_cookie)], middleware=[Middleware(SecurityHeaders)])
