"""Which engine each sequence of one request goes to, at first and when its engine has failed it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

import msgspec

from moiety_platform.engine_client.base import Connection, EngineClient, EngineState
from moiety_platform.errors import EngineFailed, EngineOverloaded, EngineRefused, NotFound, PlatformError, Unavailable
from moiety_platform.randomness import random_hex
from moiety_platform.routing.replica_breakers import RequestOutcome
from moiety_platform.routing.replicas import Replicas
from moiety_platform.routing.roles import Need, is_handed_over, kv_address_of
from moiety_wire.classes import ServiceClass
from moiety_wire.roles import KvHandoff, transfer_token

MAX_ENGINES = 8  # are asked for one request, whatever they answer
MAX_RESUBMISSIONS = 2  # after failed engines: what kills its engine must not kill them all


class Place(msgspec.Struct, frozen=True):
    """An engine, by the connection to it at the moment of the choice. Where it computes the prompt only, `partner` is
    the engine that goes on, and `hand_over` says where the KV goes."""

    client: EngineClient
    connection: Connection
    partner: Place | None = None
    hand_over: KvHandoff | None = None


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

    def choose(self, prefix: Iterable[bytes], need: Need, context_tokens: int) -> Place:
        """Return the engine for a new sequence with so many tokens of prompt and output. Raises NotFound
        or Unavailable."""
        return self._choose(prefix, need, self._left, context_tokens)

    def expect(self, partner: Place) -> Callable[[], None]:
        """A sequence is on its way there, until what this returns is called, once."""
        return self._replicas.expect(partner.connection[0])

    def begin(self, place: Place) -> RequestOutcome:
        """Note that a sequence goes to that engine, whose circuit breaker learns from what is told of its end."""
        return self._replicas.breakers.begin(place.connection[0])

    def leave(self, connection: Connection, error: PlatformError) -> None:
        """That engine has ended a sequence with that error, and gets none of the request any more."""
        is_failure = isinstance(error, EngineFailed) and not isinstance(error, EngineRefused)
        if is_failure and connection not in self._left:
            self._num_failed += 1
        self._left.add(connection)

    async def choose_again(
        self, prefix: Iterable[bytes], need: Need, failure: PlatformError, context_tokens: int
    ) -> Place:
        """Another engine than those that were left; one of their addresses only once it has been connected anew and
        no other engine is there. Raises the failure if there is no engine in time, or too many have failed. Nobody
        is waited for where engines that are there refused it."""
        if self._num_failed > MAX_RESUBMISSIONS or len(self._left) >= MAX_ENGINES:
            raise failure
        loop = asyncio.get_running_loop()
        until = loop.time() + (0 if isinstance(failure, EngineRefused | EngineOverloaded) else self._wait_s)
        while True:
            addresses = {address for address, _ in self._left}
            same = {state.connection for state in self._replicas.states() if state.address in addresses}
            for avoided in (same | self._left, self._left):
                try:
                    return self._choose(prefix, need, avoided, context_tokens)
                except (NotFound, Unavailable):
                    continue
            left_s = until - loop.time()
            if left_s <= 0:
                raise failure
            await self._replicas.wait_change(left_s)

    def _choose(self, prefix: Iterable[bytes], need: Need, avoid: Collection[Connection], context_tokens: int) -> Place:
        client, state = self._replicas.choose(self._model, self._service, prefix, avoid, need, context_tokens)
        if not is_handed_over(state, need):
            return Place(client, state.connection)
        partner_client, partner = self._replicas.choose_partner(self._model, self._service, avoid, context_tokens)
        return Place(client, state.connection, Place(partner_client, partner.connection), _hand_over_to(partner))


def _hand_over_to(engine: EngineState) -> KvHandoff:
    assert engine.card is not None, "chosen by its card"
    transfer_id = random_hex(16)
    token = transfer_token(engine.card.kv_secret, transfer_id)
    return KvHandoff(transfer_id, kv_address_of(engine), engine.card.kv_host, token)
