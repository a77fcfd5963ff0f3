"""Which engine each sequence of one request goes to, at first and when its engine has failed it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

import msgspec

from moiety_platform.engine_client.base import Connection, EngineClient
from moiety_platform.errors import EngineFailed, NotFound, PlatformError, Unavailable
from moiety_platform.routing.replicas import Replicas
from moiety_wire.classes import ServiceClass

MAX_RESUBMISSIONS = 2  # after failed engines: what kills its engine must not kill them all


class Place(msgspec.Struct, frozen=True):
    """An engine, by the connection to it at the moment of the choice."""

    client: EngineClient
    connection: Connection


class Placement:
    """Of one request. What one of its sequences has learned of an engine counts for the others."""

    def __init__(self, replicas: Replicas, model: str, service: ServiceClass, wait_s: float) -> None:
        """`wait_s`: for how long a sequence that no engine can take waits for one to come back."""
        self._replicas = replicas
        self._model = model
        self._service = service
        self._wait_s = wait_s
        self._left: set[Connection] = set()  # which had a sequence of this request, or were gone
        self._num_failed = 0  # of them, those that failed while they had one

    def choose(self, prefix: Iterable[bytes]) -> Place:
        """The engine for a new sequence. Raises NotFound or Unavailable."""
        return self._choose(prefix, self._left)

    def leave(self, connection: Connection, error: PlatformError) -> None:
        """That engine has ended a sequence with that error, and gets none of the request any more."""
        if isinstance(error, EngineFailed) and connection not in self._left:
            self._num_failed += 1
        self._left.add(connection)

    async def choose_again(self, prefix: Iterable[bytes], failure: PlatformError) -> Place:
        """Another engine than those that were left; one of their addresses only once it has been connected anew and
        no other engine is there. Raises the failure if there is no engine in time, or too many have failed."""
        if self._num_failed > MAX_RESUBMISSIONS:
            raise failure
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait_s
        while True:
            addresses = {address for address, _ in self._left}
            same = {state.connection for state in self._replicas.states() if state.address in addresses}
            for avoided in (same | self._left, self._left):
                try:
                    return self._choose(prefix, avoided)
                except (NotFound, Unavailable):
                    continue
            left_s = until - loop.time()
            if left_s <= 0:
                raise failure
            await self._replicas.wait_change(left_s)

    def _choose(self, prefix: Iterable[bytes], avoid: Collection[Connection]) -> Place:
        client, state = self._replicas.choose(self._model, self._service, prefix, avoid)
        return Place(client, state.connection)
