"""Engine discovery by DNS: each address of a name is an engine that can come and go."""

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
    """Return the engine addresses of a name. Raises OSError.

    IPv6 is used only without IPv4 addresses, so that an engine with both is not counted twice.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = {family: {address[0] for kind, _, _, _, address in found if kind == family} for family, *_ in found}
    if socket.AF_INET in hosts:
        return {f"tcp://{ip}:{port}" for ip in hosts[socket.AF_INET]}
    return {f"tcp://[{ip}]:{port}" for ip in hosts.get(socket.AF_INET6, ())}


class DnsWatch:
    """Keeps the replicas equal to the addresses of one name. Owns the engines that it has added."""

    def __init__(
        self, address: str, replicas: Replicas, connect: Callable[[str], EngineClient], resolve: Resolve = resolve
    ) -> None:
        self._address = address
        self._host, self._port = split_name(address)
        self._replicas = replicas
        self._connect = connect
        self._resolve = resolve
        self._added: set[str] = set()
        self._found: frozenset[str] = frozenset()  # at the last look-up
        self._rounds = PeriodicTask(f"engine-names {address}", self.refresh, INTERVAL_S)

    async def start(self) -> None:
        """Look up the name now and then periodically."""
        self.begin()

    def begin(self) -> None:
        """Start synchronously, in a running loop."""
        self._rounds.start()
        self._rounds.wake()

    @property
    def addresses(self) -> frozenset[str]:
        """Addresses of the engines that it has added."""
        return frozenset(self._added)

    def release_engine(self, address: str) -> None:
        """Release an engine that the settings now list by its address."""
        self._added.discard(address)

    def take_over_engine(self, address: str) -> bool:
        """Return whether an engine that the settings no longer list belongs to this name; if so, take it over."""
        is_ours = address in self._found and self._replicas.find(address) is not None
        if is_ours:
            self._added.add(address)
        return is_ours

    async def leave(self, kept: Collection[str]) -> None:
        """Stop following the name: its engines, except those in `kept`, get no more requests."""
        await self.stop()
        self._replicas.missing.pop(self._address, None)
        for address in self._added.difference(kept):
            self._replicas.retire(address)
        self._added.clear()

    async def stop(self) -> None:
        """Stop the look-ups. Idempotent."""
        await self._rounds.cancel()

    async def refresh(self) -> None:
        """Look up the name once: new engines join, removed ones get no more requests and are closed once idle.

        A name that cannot be resolved changes nothing: the state of its engines follows from their connections.
        """
        try:
            found = set(await self._resolve(self._host, self._port))
        except (OSError, UnicodeError) as error:
            if not self._added:
                self._replicas.missing[self._address] = f"the name cannot be resolved: {error}"
            log.warning(
                "engine_name_unresolved",
                name=self._address,
                error=str(error),
                num_engines=len(self._added),
                advice="check the DNS name and the name server",
            )
        else:
            self._found = frozenset(found)
            self._replicas.missing.pop(self._address, None)
            for address in self._added - found:
                self._replicas.retire(address)
                log.info("engine_removed", name=self._address, engine=address)
            self._added &= found
            for address in found - self._added:
                if await self._replicas.join(address, self._connect):
                    self._added.add(address)
                    log.info("engine_added", name=self._address, engine=address)
        await self._replicas.close_retired()
