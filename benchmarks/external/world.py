"""Participants of a check: a tenant's client, an administrator's, and the server's own counters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai

from external.processes import Server
from moiety_platform.external_engines.metrics import ExternalMetrics, read_metrics

CALL_S = 120.0


class World:
    def __init__(self, url: str, server: Server, keys: dict[str, str]) -> None:
        self.server = server
        self._http = httpx.AsyncClient(trust_env=False, timeout=CALL_S)
        self._url = url
        headers = {"Authorization": f"Bearer {keys['admin_key']}"}
        self.admin = httpx.AsyncClient(base_url=f"{url}/admin/v1", headers=headers, trust_env=False, timeout=CALL_S)
        self.client = self.client_of(keys["tenant_key"])

    @classmethod
    async def open(cls, url: str, server: Server, folder: Path) -> World:
        world = cls(url, server, json.loads((folder / "keys.json").read_text()))
        await until(lambda: world._is(f"{url}/readyz"), 30)
        return world

    async def close(self) -> None:
        await self.client.close()
        await self.admin.aclose()
        await self._http.aclose()

    def client_of(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key=key, max_retries=0, timeout=CALL_S)

    def client_of_server(self) -> openai.AsyncOpenAI:
        """Client that connects to the server without the gateway."""
        return openai.AsyncOpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0)

    async def figures(self) -> ExternalMetrics:
        text = (await self._http.get(f"{self.server.url}/metrics")).text
        figures = read_metrics(self.server.kind, text)
        assert figures is not None, "the server has metrics"
        return figures

    async def is_idle(self) -> bool:
        figures = await self.figures()
        return figures.num_running + figures.num_waiting == 0

    async def quiet(self) -> None:
        await until(self.is_idle, 60)

    async def rows(self, at_least: int = 0) -> list[dict[str, Any]]:
        """Return the usage rows, newest first, once this number is stored, which is a moment after the answer."""
        return await self._rows_once(lambda rows: len(rows) >= at_least)

    async def rows_of(self, ids: set[str]) -> list[dict[str, Any]]:
        """Return the usage rows of these requests, once all are stored."""
        rows = await self._rows_once(lambda rows: ids <= {row["request_id"] for row in rows})
        return [row for row in rows if row["request_id"] in ids]

    async def _rows_once(self, are_there: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []

        async def have_come() -> bool:
            nonlocal rows
            rows, cursor = [], ""
            while cursor is not None:
                parameters = {"limit": 100} | ({"cursor": cursor} if cursor else {})
                page = (await self.admin.get("/usage/requests", params=parameters)).raise_for_status().json()
                rows, cursor = rows + page["data"], page["next_cursor"]
            return are_there(rows)

        await until(have_come, 20)
        return rows

    async def _is(self, url: str) -> bool:
        return (await self._http.get(url)).status_code == httpx.codes.OK


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float, pause_s: float = 0.1) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - a server elsewhere has no event
            await asyncio.sleep(pause_s)
