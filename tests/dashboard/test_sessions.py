"""Sessions that outlive a reload, and what a session shows of a gateway that does not respond."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from moiety_dashboard import session
from moiety_dashboard.browser_sessions import (
    COOKIE,
    MAX_AGE_S,
    PATH,
    TICKET_AGE_S,
    BrowserSessions,
    browser_sessions,
    set_cookie,
)
from moiety_dashboard.client import AdminClient, GatewayUnreachable
from moiety_dashboard.gateway_state import GatewayState

KEY = "mty_of.an-administrator"


class Clock:
    """Monotonic seconds."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_ticket_is_good_once_and_for_a_short_time() -> None:
    clock = Clock()
    sessions = BrowserSessions(clock)
    session_id, ticket = sessions.start(KEY)
    assert sessions.is_unredeemed(ticket)
    assert sessions.redeem(ticket) == session_id
    assert sessions.redeem(ticket) is None
    assert sessions.redeem("another") is None
    _, late = sessions.start(KEY)
    clock.now_s += TICKET_AGE_S
    assert sessions.redeem(late) is None


def test_a_session_ends_at_sign_out_and_at_its_age() -> None:
    clock = Clock()
    sessions = BrowserSessions(clock)
    (first, ticket), (second, _) = sessions.start(KEY), sessions.start("another key")
    assert [sessions.credential_of(one) for one in (first, second)] == [KEY, "another key"]
    sessions.end(first)
    sessions.end(first)
    assert sessions.credential_of(first) is None and sessions.redeem(ticket) is None
    clock.now_s += MAX_AGE_S
    assert sessions.credential_of(second) is None


async def answer(path: str, **headers: str) -> httpx.Response:
    app = Starlette(routes=[Route(PATH, set_cookie)])
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://dashboard") as http:
        return await http.get(path, headers=given)


@pytest.mark.parametrize(("proto", "is_secure"), [("http", False), ("https", True)])
async def test_the_cookie_has_no_key_and_no_script_or_other_site_gets_it(proto: str, is_secure: bool) -> None:
    session_id, ticket = browser_sessions().start(KEY)
    given = await answer(f"{PATH}?ticket={ticket}", sec_fetch_site="same-origin", x_forwarded_proto=proto)
    name, _, attributes = given.headers["set-cookie"].partition("=")
    assert (given.status_code, name, attributes.split(";")[0]) == (200, COOKIE, session_id)
    assert "HttpOnly" in attributes and "SameSite=strict" in attributes
    assert ("Secure" in attributes) is is_secure
    assert KEY not in f"{given.headers} {given.text}"
    browser_sessions().end(session_id)


async def test_another_site_cannot_sign_its_user_in_and_does_not_use_up_the_ticket() -> None:
    session_id, ticket = browser_sessions().start(KEY)
    refused = await answer(f"{PATH}?ticket={ticket}", sec_fetch_site="cross-site")
    unknown = await answer(PATH)
    assert [(one.status_code, "set-cookie" in one.headers) for one in (refused, unknown)] == [(403, False)] * 2
    assert browser_sessions().redeem(ticket) == session_id
    browser_sessions().end(session_id)


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers, as a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_silent_gateway_is_found_by_the_probe_and_further_requests_do_not_wait(silent: str) -> None:
    state = GatewayState()
    with httpx.Client(timeout=60) as http:
        assert not state.probe(http, silent)
        client = AdminClient(silent, KEY, http, state.begin_drawing("page"))
        with pytest.raises(GatewayUnreachable):
            client.get("/classes")  # at once: the client itself would wait for a minute


def test_the_last_answers_are_shown_while_the_gateway_is_away() -> None:
    told = iter(range(100))
    is_up = True

    def respond(request: httpx.Request) -> httpx.Response:
        if not is_up:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"path": request.url.path, "number": next(told)})

    state = GatewayState()

    def draw(part: str, since: str) -> list[int]:
        client = AdminClient("http://gateway", KEY, http, state.begin_drawing(part))
        return [
            client.get("/usage", since=since).data["number"],
            client.get("/usage", since=f"{since}0").data["number"],  # another time range of the same page
            client.get("/classes").data["number"],
        ]

    with httpx.Client(transport=httpx.MockTransport(respond)) as http:
        before = draw("overview", "1")
        is_up = False
        assert draw("overview", "2") == before  # the times differ at each drawing
        with pytest.raises(GatewayUnreachable):
            draw("another page", "2")
        is_up = True
        assert draw("overview", "3") != before


@pytest.mark.parametrize(
    ("roles", "may", "name"),
    [
        ([{"tenant_id": "ten_a", "tenant_name": "acme"}], [], "acme"),
        ([], ["tenants.read"], "of a key"),  # a key has no role
        ([], [], None),
    ],
)
def test_a_signed_in_user_sees_the_name_of_its_tenant(roles: list[Any], may: list[str], name: str | None) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/tenants"):
            return httpx.Response(200, json={"data": [{"id": "ten_a", "name": "of a key"}], "next_cursor": None})
        return httpx.Response(200, json={"role": "viewer", "tenant_id": "ten_a", "roles": roles, "may": may})

    with httpx.Client(transport=httpx.MockTransport(respond)) as http:
        assert session.read_caller(AdminClient("http://gateway", KEY, http))[session.TENANT_NAME] == name
