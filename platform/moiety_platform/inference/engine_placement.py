"""Chooses the engine of each sequence of a request, at first and after failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

import msgspec

from moiety_platform.engine_client.base import Connection, EngineClient, EngineState
from moiety_platform.errors import EngineFailed, EngineOverloaded, EngineRefused, NotFound, PlatformError, Unavailable
from moiety_platform.randomness import random_hex
from moiety_platform.routing.choose import Prefix, RequestNeed, kv_address_of, needs_decode_engine
from moiety_platform.routing.circuit_breaker import RequestOutcome
from moiety_platform.routing.replicas import Replicas
from moiety_wire.classes import ServiceClass
from moiety_wire.images import ImageRules
from moiety_wire.roles import KvHandoff, transfer_token

MAX_ENGINES = 8  # engines tried for one request, whatever they answer
MAX_RESUBMISSIONS = 2  # after engine failures, so that a request that crashes engines cannot crash all of them


class Place(msgspec.Struct, frozen=True):
    """A chosen engine, identified by its connection at that moment.

    If it only prefills, `partner` is the decode engine and `hand_over` describes the KV transfer.
    """

    client: EngineClient
    connection: Connection
    partner: Place | None = None
    hand_over: KvHandoff | None = None


class Placement:
    """Placement of one request. Failures of one of its sequences apply to all of them."""

    def __init__(
        self, replicas: Replicas, model: str, service: ServiceClass, wait_s: float, images: ImageRules | None = None
    ) -> None:
        """Create the placement. `wait_s` is how long a sequence without a usable engine waits for one.

        `images` are the rules that the placeholders of the prompt's images were written by, if it has some.
        """
        self._replicas = replicas
        self._model = model
        self._service = service
        self.wait_s = wait_s  # can be changed while the request runs
        self._images = images
        self._excluded: set[Connection] = set()  # engines that ended a sequence of this request or were unreachable
        self._num_failed = 0  # engines in `_excluded` that failed

    def choose(
        self,
        prefix: Iterable[bytes],
        need: RequestNeed,
        context_tokens: int,
        avoid: Collection[Connection] | None = None,
    ) -> Place:
        """Return the engine for a sequence, none of those in `avoid`: by default those that ended one of the request.

        `context_tokens` counts its prompt and output. Raises NotFound or Unavailable.
        """
        avoid = self._excluded if avoid is None else avoid
        client, state = self._replicas.choose(
            self._model, self._service, prefix, avoid, need, context_tokens, self._images
        )
        if not needs_decode_engine(state, need):
            return Place(client, state.connection)
        partner_client, partner = self._replicas.choose_partner(
            self._model, self._service, avoid, context_tokens, self._images
        )
        return Place(client, state.connection, Place(partner_client, partner.connection), _hand_over_to(partner))

    async def hash_prefix(self, prefix: Prefix) -> None:
        """Hash the blocks of a long prompt before `choose`, in slices between which other tasks run."""
        await self._replicas.hash_prefix(self._model, prefix)

    def learn_experts(self, prefix: Prefix, profile: bytes) -> None:
        """Note the experts that an ended sequence used, for later requests like it, if requests are routed by them."""
        if (experts := self._replicas.experts) is not None:
            experts.learn(self._model, *prefix.expert_key(), profile)

    def expect(self, partner: Place) -> Callable[[], None]:
        """Announce a sequence to the decode engine. The returned function ends the announcement and is called once."""
        return self._replicas.expect(partner.connection[0])

    def begin(self, place: Place) -> RequestOutcome:
        """Record that a sequence goes to the engine.

        The returned outcome reports its end to the engine's circuit breaker.
        """
        return self._replicas.breakers.begin(place.connection[0])

    def exclude_engine(self, connection: Connection, error: PlatformError) -> None:
        """Record that the engine ended a sequence with an error. It gets no more sequences of the request."""
        is_failure = isinstance(error, EngineFailed) and not isinstance(error, EngineRefused)
        if is_failure and connection not in self._excluded:
            self._num_failed += 1
        self._excluded.add(connection)

    async def choose_again(
        self, prefix: Iterable[bytes], need: RequestNeed, failure: PlatformError, context_tokens: int
    ) -> Place:
        """Return an engine other than those that ended a sequence.

        The same address is used again only after a reconnection and if there is no other engine. Raises the failure if
        no engine becomes available in time, or if too many have failed. Does not wait if available engines refused the
        sequence.
        """
        if self._num_failed > MAX_RESUBMISSIONS or len(self._excluded) >= MAX_ENGINES:
            raise failure
        loop = asyncio.get_running_loop()
        until = loop.time() + (0 if isinstance(failure, EngineRefused | EngineOverloaded) else self.wait_s)
        while True:
            addresses = {address for address, _ in self._excluded}
            same = {state.connection for state in self._replicas.states() if state.address in addresses}
            for avoided in (same | self._excluded, self._excluded):
                try:
                    return self.choose(prefix, need, context_tokens, avoided)
                except (NotFound, Unavailable):
                    continue
            left_s = until - loop.time()
            if left_s <= 0:
                raise failure
            await self._replicas.wait_change(left_s)


def _hand_over_to(engine: EngineState) -> KvHandoff:
    assert engine.card is not None, "chosen by its card"
    transfer_id = random_hex(16)
    token = transfer_token(engine.card.kv_secret, transfer_id)
    return KvHandoff(transfer_id, kv_address_of(engine), engine.card.kv_host, token, engine.card.kv_ranks)
