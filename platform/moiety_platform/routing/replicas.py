"""The engines this gateway is connected to. Owns their clients; starts and stops them together."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import Self

from moiety_platform.clock import Clock, SystemClock
from moiety_platform.engine_client.base import Connection, EngineClient, EngineState
from moiety_platform.errors import NotFound, Unavailable
from moiety_platform.routing.choose import able_engines, card_of, cards_of, choose
from moiety_platform.routing.replica_breakers import ReplicaBreakers
from moiety_platform.routing.roles import Need, first_engines, partner_among, takes_over
from moiety_wire.classes import ServiceClass
from moiety_wire.messages import ModelCard


class Replicas:
    """All configured engines, connected or not, in the order of the settings, then those that have joined.
    `missing` says of names, whose engines are not known, why not."""

    def __init__(self, clients: Sequence[EngineClient], clock: Clock | None = None) -> None:
        self.breakers = ReplicaBreakers(clock or SystemClock())
        self.missing: dict[str, str] = {}
        self._clients = {client.address: client for client in clients}
        self._retired: dict[str, EngineClient] = {}
        self._replaced: list[EngineClient] = []  # by another client of the same address
        self._changed = asyncio.Event()  # replaced by a new one each time that it is set
        self._coming: Counter[str] = Counter()  # requests that are on their way to an engine, by its address

    async def __aenter__(self) -> Self:
        for client in self._clients.values():
            client.watch(self._note_change)
        await asyncio.gather(*(client.start() for client in self._clients.values()))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.gather(*(client.close() for client in self.connected()))

    async def join(self, address: str, connect: Callable[[str], EngineClient]) -> bool:
        """Take an engine in. False: it is there already."""
        if address in self._clients:
            return False
        client = self._retired.pop(address, None)
        if client is None:
            client = connect(address)
            await self.start(client)
        self._clients[address] = client
        self._note_change()
        return True

    async def start(self, client: EngineClient) -> None:
        """Connect, without requests yet: see `admit`."""
        client.watch(self._note_change)
        await client.start()

    def admit(self, client: EngineClient) -> None:
        """Give requests to an engine that was started, in the place of one of the same address, if there is one."""
        if (before := self._clients.get(client.address)) is not None:
            self._replaced.append(before)
        if (left := self._retired.pop(client.address, None)) is not None:
            self._replaced.append(left)
        self._clients[client.address] = client
        self.breakers.forget(client.address)
        self._note_change()

    def find(self, address: str) -> EngineClient | None:
        return self._clients.get(address)

    def retire(self, address: str) -> None:
        """Give an engine no more requests; those that it has go on. Nothing where it is not known."""
        client = self._clients.pop(address, None)
        if client is None:
            return
        self._retired[address] = client
        self.breakers.forget(address)
        self._note_change()

    async def close_retired(self) -> None:
        """Close the links to retired engines that have none of our requests any more."""
        idle = {address: client for address, client in self._retired.items() if not client.state.num_inflight}
        for address in idle:  # at once, before others get their turn
            del self._retired[address]
        replaced = [client for client in self._replaced if not client.state.num_inflight]
        self._replaced = [client for client in self._replaced if client not in replaced]
        for client in (*idle.values(), *replaced):
            await client.close()

    def clients(self) -> list[EngineClient]:
        return list(self._clients.values())

    def connected(self) -> list[EngineClient]:
        """Those that get no more requests, and still have some of ours, too."""
        return [*self._clients.values(), *self._retired.values(), *self._replaced]

    def states(self) -> list[EngineState]:
        return [client.state for client in self._clients.values()]

    def choose(
        self,
        model: str,
        service: ServiceClass,
        prefix: Iterable[bytes] = (),
        avoid: Collection[Connection] = (),
        need: Need = Need.ANSWER,
        context_tokens: int = 0,
    ) -> tuple[EngineClient, EngineState]:
        """The client to submit a request of that class and prefix to, none of those to be avoided and with
        a context of at least so many tokens, and its state.
        Raises NotFound or Unavailable."""
        states = self._states_but(avoid)
        willing = self.breakers.willing(states)
        if len(willing) < len(states):
            try:
                state = choose(willing, model, service, prefix, need, context_tokens)
            except (NotFound, Unavailable):
                able = first_engines(able_engines(states, model, context_tokens), need)
                state = choose(self.breakers.least_bad(able, model), model, service, prefix, need)
        else:
            state = choose(states, model, service, prefix, need, context_tokens)
        return self._clients[state.address], state

    def choose_partner(
        self, model: str, service: ServiceClass, avoid: Collection[Connection], context_tokens: int = 0
    ) -> tuple[EngineClient, EngineState]:
        """Who goes on with a request of that class, once an engine has computed its prompt. Raises Unavailable."""
        able = able_engines(self._states_but(avoid), model, context_tokens)
        willing = self.breakers.willing(able)
        if any(map(takes_over, willing)):
            state = partner_among(willing, service, self._coming)
        else:
            partners = [engine for engine in able if takes_over(engine)]
            state = partner_among(partners and self.breakers.least_bad(partners, model), service, self._coming)
        return self._clients[state.address], state

    def expect(self, address: str) -> Callable[[], None]:
        """A request is on its way to that engine, until what this returns is called, once."""
        self._coming[address] += 1

        def no_more() -> None:
            self._coming[address] -= 1
            if not self._coming[address]:
                del self._coming[address]

        return no_more

    def _states_but(self, avoid: Collection[Connection]) -> list[EngineState]:
        states = self.states()
        return [state for state in states if state.connection not in avoid] if avoid else states

    async def wait_change(self, timeout_s: float) -> None:
        """Return when an engine has come or gone, or after the timeout."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def card(self, model: str, allowed: frozenset[str] | None) -> ModelCard:
        """The card of an engine that can take a request, for a key that may use the models `allowed`, None being all.
        Raises NotFound or Unavailable."""
        return card_of(self.states(), model, allowed)

    def cards(self) -> dict[str, ModelCard]:
        """The card of every model that some engine has shown, by model name; of healthy engines where possible."""
        return cards_of(self.states())

    def have_settled_for(self, replica_id: str, seconds: float) -> bool:
        """Whether every engine has proven that it holds nothing of a gateway process that nobody has heard of for so
        long. Nothing is proven while an engine is missing, or one that was left may still hold something."""
        states = self.states()
        if not states or self.missing or self._retired or self._replaced:
            return False
        return all(state.has_settled_for(replica_id, seconds) for state in states)

    def why_not_ready(self) -> list[str]:
        """Empty if at least one engine can take a request or was put to sleep, else a reason an engine. Were a gateway
        whose engines sleep called unready, nobody could reach it any more to wake them."""
        states = self.states()
        if any(state.healthy and not state.draining for state in states):
            return []
        if not states and not self.missing:
            return ["no engine is configured; set MOIETY_ENGINES to the address of an engine front"]
        reasons = [f"engine {state.address}: {state.reason or 'draining'}" for state in states]
        return reasons + [f"engines {name}: {why}" for name, why in self.missing.items()]

    def rest(self, engine_id: str, *, asleep: bool) -> EngineState:
        """Tell an engine to sleep or to wake; returns its state before. Raises NotFound, Unavailable or Conflict."""
        for client in self._clients.values():
            state = client.state
            if state.card is not None and state.card.engine_id == engine_id:
                client.rest(asleep=asleep)
                return state
        raise NotFound(
            f"there is no engine {engine_id[:256]!r}; GET /admin/v1/engines lists them by their card's engine_id"
        )

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
