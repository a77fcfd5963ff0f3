"""The client of the admin API: requests at the same time, and slow answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

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


class Parts(httpx.SyncByteStream):
    """A body in parts, whose end is noted."""

    def __init__(self, *parts: bytes) -> None:
        self.parts, self.is_closed = parts, False

    def __iter__(self) -> Iterator[bytes]:
        yield from self.parts

    def close(self) -> None:
        self.is_closed = True


class Leaves(Exception):
    """The user opens another page."""


def test_a_slow_answer_is_waited_for_and_left_with_the_page() -> None:
    body = Parts(b" ", b" ", b'{"state":', b'"done"}')
    client = client_of(httpx.MockTransport(lambda _: httpx.Response(200, stream=body)), GatewayState())
    waits: list[int] = []
    answer = client.ask_slowly("/contract-checks", {"a": 1}, lambda: waits.append(1))
    assert (answer.data, len(waits)) == ({"state": "done"}, 4)
    assert answer.query.startswith("curl ") and "--json" in answer.query

    def leave() -> None:
        raise Leaves

    body.is_closed = False
    with pytest.raises(Leaves):
        client.ask_slowly("/contract-checks", {}, leave)
    assert body.is_closed

    refused = httpx.MockTransport(lambda _: httpx.Response(409, json={"error": {"message": "busy", "code": "b"}}))
    with pytest.raises(ApiRefused, match="busy"):
        client_of(refused, GatewayState()).ask_slowly("/contract-checks", {}, leave)
