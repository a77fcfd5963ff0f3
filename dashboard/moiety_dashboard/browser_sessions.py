"""Sessions of browsers that outlive a reload: a cookie with a random id, and the credential in this process's memory.

Only an HTTP response can set a cookie that scripts cannot read, and a page signs in over its WebSocket. So a sign-in
makes a ticket, which the page redeems at once with a request to `PATH`, whose response sets the cookie. A ticket is
good for one use within seconds; the id and the credential are in no address and in no page.
"""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COOKIE = "moiety_dashboard_session"
PATH = "/moiety-session"
TICKET = "ticket"  # parameter of the path
MAX_AGE_S = 12 * 3600
TICKET_AGE_S = 60
MAX_SESSIONS = 10_000
ID_BYTES = 32
EMPTY_IMAGE = b'<svg xmlns="http://www.w3.org/2000/svg"/>'


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """One session; `expires_at` is monotonic."""

    credential: str
    expires_at: float

    def __repr__(self) -> str:
        return "BrowserSession()"  # never the credential


class BrowserSessions:
    """All sessions of a dashboard, for several threads. They end with the process, at sign-out, and at their age."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` returns monotonic seconds."""
        self._now = now
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, BrowserSession] = OrderedDict()  # by id
        self._tickets: dict[str, tuple[str, float]] = {}  # id of the session, and the end of the ticket

    def start(self, credential: str) -> tuple[str, str]:
        """Begin a session; return its id, and the ticket for its cookie."""
        session_id, ticket = secrets.token_urlsafe(ID_BYTES), secrets.token_urlsafe(ID_BYTES)
        with self._lock:
            self._forget_old()
            self._sessions[session_id] = BrowserSession(credential, self._now() + MAX_AGE_S)
            self._tickets[ticket] = session_id, self._now() + TICKET_AGE_S
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return session_id, ticket

    def redeem(self, ticket: str) -> str | None:
        """Return the id of the ticket's session, and void the ticket; None if it is not valid."""
        with self._lock:
            self._forget_old()
            session_id, _ = self._tickets.pop(ticket, (None, 0.0))
            return session_id if session_id in self._sessions else None

    def is_unredeemed(self, ticket: str) -> bool:
        with self._lock:
            return ticket in self._tickets

    def credential_of(self, session_id: str) -> str | None:
        """Return the credential of a session; None if there is no such session any more."""
        with self._lock:
            self._forget_old()
            found = self._sessions.get(session_id)
            return None if found is None else found.credential

    def end(self, session_id: str) -> None:
        """End a session. Idempotent."""
        with self._lock:
            self._sessions.pop(session_id, None)

    def _forget_old(self) -> None:
        now = self._now()
        while self._sessions and next(iter(self._sessions.values())).expires_at <= now:
            self._sessions.popitem(last=False)
        self._tickets = {ticket: (one, end) for ticket, (one, end) in self._tickets.items() if end > now}


@functools.cache
def browser_sessions() -> BrowserSessions:
    """Return the sessions of this process, which its pages and its web server share."""
    return BrowserSessions()


def set_cookie(request: Any) -> Any:
    """Answer the request of a page for its cookie: an empty image with the cookie, or 403."""
    from starlette.responses import Response  # noqa: PLC0415  heavy, and only for those who run it

    no_store = {"cache-control": "no-store"}
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":  # another site would sign its user in
        return Response(status_code=403, headers=no_store)
    session_id = browser_sessions().redeem(request.query_params.get(TICKET, ""))
    if session_id is None:
        return Response(status_code=403, headers=no_store)
    response = Response(EMPTY_IMAGE, media_type="image/svg+xml", headers=no_store)
    is_secure = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
    response.set_cookie(COOKIE, session_id, MAX_AGE_S, httponly=True, samesite="strict", secure=is_secure)
    return response
