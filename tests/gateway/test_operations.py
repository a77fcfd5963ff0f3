"""The operations listener: who reads `/metrics` and `/schema` without a key, and what the API's port says of them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from moiety_platform.bootstrap.composition import assembled
from moiety_platform.cli.serve import claim_operations_port
from moiety_platform.clock import SystemClock
from moiety_platform.db.session import Database
from moiety_platform.gateway import serving_operations
from moiety_platform.listening import bind
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.settings import SECTION, GatewaySettings
from moiety_platform.supervisor.errors import CannotListen

from .conftest import PEPPER, make_store

PAGES = (
    "/metrics", "/schema", "/schema/public", "/schema/admin", "/schema/public.json", "/schema/admin.json",
    "/schema/openapi.json",
)  # fmt: skip


class Both:
    """Clients of the two ports, and the servers behind them."""

    def __init__(self, public: Any, operations: Any, server: Any, key: str) -> None:
        self.public = httpx.AsyncClient(base_url=public, timeout=30)
        self.operations = None if operations is None else httpx.AsyncClient(base_url=operations, timeout=30)
        self.server, self.key = server, key

    async def close(self) -> None:
        for client in (self.public, self.operations):
            if client is not None:
                await client.aclose()


@pytest.fixture
async def running(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Both]]:
    """`async with running(**settings) as both`: a whole gateway on loopback, whatever the settings call its host."""

    @asynccontextmanager
    async def run(**given: Any) -> AsyncIterator[Any]:
        file = tmp_path / "moiety.yaml"
        file.write_text(json.dumps({"gateway": {"data_dir": str(tmp_path), "key_pepper": PEPPER.decode(), **given}}))
        source = SettingsSource.open(file, SECTION, partial(GatewaySettings.load, file))
        database = Database.open(source.first.store_url)
        keys = await make_store(database, SystemClock())
        listener = bind("127.0.0.1", 0)
        apart = bind("127.0.0.1", 0) if source.first.operations_port is not None else None
        async with assembled(source) as whole:
            server = whole.server
            serving = asyncio.create_task(_serve(server, listener, whole.make_operations, apart))
            both = Both(_url(listener), None if apart is None else _url(apart), server, keys.tenant_key)
            try:
                yield both
            finally:
                await both.close()
                server.request_exit()
                await serving
        await database.close()

    return run


def _url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def _serve(server: Any, listener: Any, make_operations: Any, apart: Any) -> None:
    async with serving_operations(make_operations, apart):
        await server.serve([listener])


async def test_with_a_listener_of_their_own_the_operations_pages_are_on_it_alone(
    running: Callable[..., AbstractAsyncContextManager[Both]],
) -> None:
    async with running(operations_port=0, host="0.0.0.0") as both:
        for path in PAGES:
            answer = await both.public.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_found"), path
            assert "/schema for" not in answer.text
            assert (await both.operations.get(path)).status_code == 200
        assert "moiety_store_ready" in (await both.operations.get("/metrics")).text
        for path in ("/v1/models", "/admin/v1/tenants", "/v1/chat/completions"):
            assert (await both.operations.get(path)).status_code == 404, "nothing else is there"
            assert (await both.public.get(path)).status_code in (401, 405)


async def test_the_documents_of_the_operations_listener_describe_the_api(
    running: Callable[..., AbstractAsyncContextManager[Both]],
) -> None:
    async with running(operations_port=0) as both:
        document = (await both.operations.get("/schema/openapi.json")).json()
        assert {"/v1/chat/completions", "/admin/v1/tenants", "/healthz"} <= document["paths"].keys()
        assert "/metrics" not in document["paths"]
        hint = (await both.operations.get("/nowhere")).json()["error"]["message"]
        assert hint == "there is no route /nowhere; see /schema for those that are"


async def test_the_probes_are_on_both_and_only_the_operations_listener_gives_reasons(
    running: Callable[..., AbstractAsyncContextManager[Both]],
) -> None:
    async with running(operations_port=0, engines=["tcp://10.255.255.1:5757"]) as both:
        for client in (both.public, both.operations):
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.head("/readyz")).status_code == 503
        stranger, operator = await both.public.get("/readyz"), await both.operations.get("/readyz")
        assert (stranger.status_code, stranger.json()) == (503, {"status": "not ready"})
        assert operator.status_code == 503
        assert operator.json()["reasons"]


async def test_the_number_of_open_requests_is_on_the_operations_listener_alone(
    running: Callable[..., AbstractAsyncContextManager[Both]],
) -> None:
    async with running(operations_port=0) as both:
        assert "open_requests" not in (await both.public.get("/readyz")).json()
        assert (await both.operations.get("/readyz")).json()["open_requests"] == 0


async def test_on_loopback_one_port_serves_all(running: Callable[..., AbstractAsyncContextManager[Both]]) -> None:
    async with running() as both:
        for path in PAGES:
            assert (await both.public.get(path)).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gateway.example"])
async def test_beyond_loopback_the_pages_are_nowhere_unless_they_have_a_port(
    running: Callable[..., AbstractAsyncContextManager[Both]], host: str
) -> None:
    async with running(host=host) as both:
        for path in PAGES:
            assert (await both.public.get(path)).status_code == 404


async def test_metrics_can_be_read_while_the_gateway_drains(
    running: Callable[..., AbstractAsyncContextManager[Both]],
) -> None:
    async with running(operations_port=0) as both:
        connected = socket.create_connection((both.public.base_url.host, both.public.base_url.port))
        try:
            fields = f"Host: t\r\nAuthorization: Bearer {both.key}\r\nContent-Length: 9\r\n\r\n"  # and no body yet
            connected.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{fields}".encode())
            async with asyncio.timeout(30):
                while not both.server.server_state.tasks:  # noqa: ASYNC110 - what is watched has no event
                    await asyncio.sleep(0.002)
            both.server.request_exit()
            assert (await both.operations.get("/metrics")).status_code == 200
            assert "the gateway is stopping" in (await both.operations.get("/readyz")).json()["reasons"]
        finally:
            connected.close()


def test_a_local_serve_keeps_one_port_on_loopback_and_two_elsewhere() -> None:
    assert claim_operations_port("127.0.0.1", "127.0.0.1", None) is None
    assert claim_operations_port("127.0.0.1", "127.0.0.1", 0) not in (None, 0)
    with bind("127.0.0.1", 0) as taken, pytest.raises(CannotListen, match="--operations-port"):
        claim_operations_port("0.0.0.0", "127.0.0.1", taken.getsockname()[1])
