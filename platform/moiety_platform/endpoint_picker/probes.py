"""Probes of the endpoints: reads `/readyz` of each at an interval, with one connection for each endpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec

from moiety_platform.endpoint_picker.members import PoolMember, PoolMembers
from moiety_platform.endpoint_picker.metrics import PickerMetrics, ProbeOutcome

TIMEOUT_S = 1.0


class ReadinessReport(msgspec.Struct):
    """Part of the answer of `/readyz` that a picker reads."""

    open_requests: int | None = None
    reason: str = ""


class MemberProber:
    """Owner of a task for each endpoint. Follows the members of the pool."""

    def __init__(
        self, endpoints: PoolMembers, metrics: PickerMetrics, interval_s: float, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._endpoints, self._metrics = endpoints, metrics
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._tasks: dict[PoolMember, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probe endpoints until the block ends; `follow_members` starts with them."""
        try:
            yield
        finally:
            tasks, self._tasks = list(self._tasks.values()), {}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def follow_members(self) -> None:
        """Start the tasks of new members, and stop those of members that have left."""
        members = set(self._endpoints.all())
        for gone in self._tasks.keys() - members:
            self._tasks.pop(gone).cancel()
        for new in members - self._tasks.keys():
            self._tasks[new] = asyncio.create_task(self._probe_forever(new))

    async def _probe_forever(self, endpoint: PoolMember) -> None:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        async with httpx.AsyncClient(timeout=self._timeout_s, limits=limits, trust_env=False) as client:
            while True:
                self._metrics.note_probe(await self._probe(client, endpoint))
                await asyncio.sleep(self._interval_s)

    async def _probe(self, client: httpx.AsyncClient, endpoint: PoolMember) -> ProbeOutcome:
        included = self._endpoints.begin_probe(endpoint)
        try:
            answer = await client.get(endpoint.at.ready_url)
        except httpx.TimeoutException:
            self._endpoints.time_out_probe(endpoint, f"no answer of {endpoint.at.ready_url} in {self._timeout_s:g} s")
            return ProbeOutcome.TIMEOUT
        except httpx.HTTPError as exc:
            self._endpoints.fail_probe(endpoint, f"{endpoint.at.ready_url}: {exc or type(exc).__name__}")
            return ProbeOutcome.UNREACHABLE
        told = ReadinessReport()
        with contextlib.suppress(msgspec.MsgspecError):
            told = msgspec.json.decode(answer.content, type=ReadinessReport)
        if answer.status_code == httpx.codes.OK:
            self._endpoints.end_probe(endpoint, included, told.open_requests)
            return ProbeOutcome.READY
        self._endpoints.fail_probe(endpoint, told.reason or f"{endpoint.at.ready_url}: {answer.status_code}")
        return ProbeOutcome.NOT_READY
