"""Engines behind a DNS name: each of its addresses is an engine, and they come and go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection

import structlog

from moiety_platform.engine_addresses import split_name
from moiety_platform.engine_client.base import EngineClient
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.routing.replicas import Replicas

INTERVAL_S = 3.0

Resolve = Callable[[str, int], Awaitable[Collection[str]]]

log = structlog.get_logger(__name__)


async def resolve(host: str, port: int) -> set[str]:
    """The engine addresses of a name: by IPv4, or by IPv6 where it has no other, so that an engine with both is not
    taken for two. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = {family: {address[0] for kind, _, _, _, address in found if kind == family} for family, *_ in found}
    if socket.AF_INET in hosts:
        return {f"tcp://{ip}:{port}" for ip in hosts[socket.AF_INET]}
    return {f"tcp://[{ip}]:{port}" for ip in hosts.get(socket.AF_INET6, ())}


class DnsWatch:
    """Keeps the replicas those of one name. Owns the engines that it has added."""

    def __init__(
        self, address: str, replicas: Replicas, connect: Callable[[str], EngineClient], resolve: Resolve = resolve
    ) -> None:
        self._address = address
        self._host, self._port = split_name(address)
        self._replicas = replicas
        self._connect = connect
        self._resolve = resolve
        self._added: set[str] = set()
        self._found: frozenset[str] = frozenset()  # when it was last looked up
        self._rounds = PeriodicTask(f"engine-names {address}", self.refresh, INTERVAL_S)

    async def start(self) -> None:
        """Look the name up, now and again and again."""
        self.begin()

    def begin(self) -> None:
        """The same, in a running loop."""
        self._rounds.start()
        self._rounds.wake()

    @property
    def addresses(self) -> frozenset[str]:
        """Of the engines that it has added."""
        return frozenset(self._added)

    def disown(self, address: str) -> None:
        """The engine is listed by its address now."""
        self._added.discard(address)

    def adopt(self, address: str) -> bool:
        """Whether an engine that is listed no more is one of this name's, and so stays."""
        is_ours = address in self._found and self._replicas.find(address) is not None
        if is_ours:
            self._added.add(address)
        return is_ours

    async def leave(self, kept: Collection[str]) -> None:
        """The name is not wanted any more: its engines, but those that are `kept`, get no more requests."""
        await self.stop()
        self._replicas.missing.pop(self._address, None)
        for address in self._added.difference(kept):
            self._replicas.retire(address)
        self._added.clear()

    async def stop(self) -> None:
        """Idempotent."""
        await self._rounds.cancel()

    async def refresh(self) -> None:
        """Look the name up once: what is new joins, what is gone gets no more requests and is left when it has none.
        A name that cannot be resolved changes nothing: its engines are told by their links."""
        try:
            found = set(await self._resolve(self._host, self._port))
        except (OSError, UnicodeError) as error:
            if not self._added:
                self._replicas.missing[self._address] = f"the name cannot be resolved: {error}"
            log.warning("engine_name_unresolved", name=self._address, error=str(error), num_engines=len(self._added))
        else:
            self._found = frozenset(found)
            self._replicas.missing.pop(self._address, None)
            for address in self._added - found:
                self._replicas.retire(address)
                log.info("engine_left", name=self._address, engine=address)
            self._added &= found
            for address in found - self._added:
                if await self._replicas.join(address, self._connect):
                    self._added.add(address)
                    log.info("engine_joined", name=self._address, engine=address)
        await self._replicas.close_retired()
