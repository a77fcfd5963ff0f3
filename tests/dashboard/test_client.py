"""The client of the admin API: requests that are sent at the same time."""

from __future__ import annotations

import threading

import httpx
import pytest

from moiety_dashboard.client import NUM_AT_ONCE, AdminClient, ApiRefused, GatewayUnreachable
from moiety_dashboard.gateway_state import GatewayState


def client_of(handler: httpx.MockTransport, state: GatewayState) -> AdminClient:
    http = httpx.Client(transport=handler)
    return AdminClient("http://gateway", "mty_key", http, state.begin_drawing("part"))


def test_answers_of_requests_at_the_same_time_are_in_the_order_of_the_requests() -> None:
    together = threading.Barrier(NUM_AT_ONCE, timeout=60)  # no request is answered before as many are there

    def answer(request: httpx.Request) -> httpx.Response:
        together.wait()
        return httpx.Response(200, json={"path": request.url.path, "day": request.url.params.get("day")})

    client = client_of(httpx.MockTransport(answer), GatewayState())
    asked = [(f"/{number}", {"day": str(number), "tenant_id": None}) for number in range(2 * NUM_AT_ONCE)]
    found = client.get_all(asked)
    assert [one.data for one in found] == [{"path": f"/admin/v1/{n}", "day": str(n)} for n in range(2 * NUM_AT_ONCE)]
    assert client.get_all([]) == []


def test_a_refusal_of_one_of_them_is_raised_and_an_absent_gateway_shows_the_last_answers() -> None:
    state, is_away = GatewayState(), threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if is_away.is_set():
            raise httpx.ConnectError("gone")
        code = 400 if request.url.path.endswith("/wrong") else 200
        return httpx.Response(code, json={"error": {"message": "no", "code": "bad"}} if code == 400 else {"n": 1})

    transport = httpx.MockTransport(answer)
    with pytest.raises(ApiRefused, match="no"):
        client_of(transport, state).get_all([("/a", {}), ("/wrong", {})])
    is_away.set()
    assert [one.data for one in client_of(transport, state).get_all([("/a", {})])] == [{"n": 1}]
    with pytest.raises(GatewayUnreachable):
        client_of(transport, state).get_all([("/a", {}), ("/unknown", {})])
