"""Engines that this gateway is connected to. Owns their clients; starts and stops them together."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import Self

from moiety_platform.clock import Clock, SystemClock
from moiety_platform.engine_client.base import Connection, EngineClient, EngineState
from moiety_platform.errors import NotFound, Unavailable
from moiety_platform.routing.choose import (
    Prefix,
    RequestNeed,
    can_continue_prefill,
    capable_engines,
    card_of,
    cards_of,
    choose,
    engines_with_vision,
    first_engines,
    partner_among,
)
from moiety_platform.routing.circuit_breaker import ReplicaBreakers
from moiety_platform.routing.expert_profiles import ExpertProfiles
from moiety_platform.routing.prefix_cost import block_size_of
from moiety_platform.routing_settings import PrefixRouting
from moiety_wire.classes import ServiceClass
from moiety_wire.images import ImageRules
from moiety_wire.messages import ModelCard


class Replicas:
    """All configured engines, connected or not, in the order of the settings, then those that have joined.

    `missing` contains names without known engines, with the reasons.
    """

    def __init__(self, clients: Sequence[EngineClient], clock: Clock | None = None) -> None:
        self.breakers = ReplicaBreakers(clock or SystemClock())
        self.missing: dict[str, str] = {}
        self._clients = {client.address: client for client in clients}
        self._retired: dict[str, EngineClient] = {}
        self._replaced: list[EngineClient] = []  # replaced by another client of the same address
        self._changed = asyncio.Event()  # replaced by a new event each time that it is set
        self._coming: Counter[str] = Counter()  # requests on their way to an engine, by its address
        self._kv_aware: random.Random | None = None  # None: requests are routed by affinity
        self.experts: ExpertProfiles | None = None  # None: requests are not routed by their experts
        self.stopped_models: frozenset[str] = frozenset()  # models that can have no running engine
        self._stopped_cards: dict[str, ModelCard] = {}  # last cards of these models

    async def __aenter__(self) -> Self:
        for client in self._clients.values():
            client.on_state_change(self._note_change)
        await asyncio.gather(*(client.start() for client in self._clients.values()))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.gather(*(client.close() for client in self.connected()))

    async def join(self, address: str, connect: Callable[[str], EngineClient]) -> bool:
        """Add an engine. Return False if it is already there."""
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
        """Connect without requests yet: see `admit`."""
        client.on_state_change(self._note_change)
        await client.start()

    def admit(self, client: EngineClient) -> None:
        """Give requests to a started engine, which replaces one of the same address, if there is one."""
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
        """Give an engine no more requests; its running requests continue. No effect for an unknown address."""
        client = self._clients.pop(address, None)
        if client is None:
            return
        self._retired[address] = client
        card = client.state.card
        if card is not None and card.model in self.stopped_models:
            self._stopped_cards[card.model] = card
        self.breakers.forget(address)
        self._note_change()

    async def close_retired(self) -> None:
        """Close the connections to retired engines that have none of our requests any more."""
        idle = {address: client for address, client in self._retired.items() if not client.state.num_inflight}
        for address in idle:  # before the first await
            del self._retired[address]
        replaced = [client for client in self._replaced if not client.state.num_inflight]
        self._replaced = [client for client in self._replaced if client not in replaced]
        for client in (*idle.values(), *replaced):
            await client.close()

    def clients(self) -> list[EngineClient]:
        return list(self._clients.values())

    def connected(self) -> list[EngineClient]:
        """Return all clients, including engines that get no more requests but still have some of ours."""
        return [*self._clients.values(), *self._retired.values(), *self._replaced]

    def states(self) -> list[EngineState]:
        states = []
        for client in self._clients.values():  # twice per request, and a comprehension would be a call
            states.append(client.state)  # noqa: PERF401
        return states

    def use(self, prefix_routing: PrefixRouting, expert_routing_tokens: int = 0) -> None:
        """Choose engines in this way from now on."""
        self._kv_aware = random.Random() if prefix_routing is PrefixRouting.KV_AWARE else None
        if not expert_routing_tokens or self._kv_aware is None:
            self.experts = None
        elif self.experts is None:
            self.experts = ExpertProfiles(expert_routing_tokens)
        else:
            self.experts.spare_tokens = expert_routing_tokens

    def forget_tenants(self, tenant_ids: Collection[str]) -> None:
        """Remove what this process knows of deleted tenants' requests. Never raises."""
        if self.experts is not None:
            self.experts.forget_tenants(tenant_ids)

    async def hash_prefix(self, model: str, prefix: Prefix) -> None:
        """Hash the blocks of a long prompt for `choose`, up to the first slice that no engine of the model has cached.

        Other tasks run between two slices.
        """
        engines = [one for one in self.states() if one.card is not None and one.card.model == model and one.can_take]
        size = block_size_of(engines) if len(engines) > 1 and self._kv_aware is not None else 0
        names = prefix.block_names(size) if size else None
        if names is None:
            return
        caches = [one.prefix_blocks for one in engines if one.prefix_blocks is not None]
        while not names.is_complete and any(names.names[-1] in cached for cached in caches):
            await asyncio.sleep(0)
            names.hash_slice()

    def choose(
        self,
        model: str,
        service: ServiceClass,
        prefix: Iterable[bytes] = (),
        avoid: Collection[Connection] = (),
        need: RequestNeed = RequestNeed.ANSWER,
        context_tokens: int = 0,
        images: ImageRules | None = None,
    ) -> tuple[EngineClient, EngineState]:
        """Return the client, and its state, for a request of that class and prefix. Raises NotFound or Unavailable.

        The engine is none of those in `avoid`, its context holds at least `context_tokens`, and it reads images by the
        rules `images`, if the prompt has some.
        """
        states = self.states() if not avoid else self._states_but(avoid)
        if images is not None:
            states = engines_with_vision(states, model, images)
        allowed_states = self.breakers.allowed_states(states)
        if len(allowed_states) < len(states):
            try:
                state = choose(
                    allowed_states, model, service, prefix, need, context_tokens, self._kv_aware, self.experts
                )
            except (NotFound, Unavailable):
                able = first_engines(capable_engines(states, model, context_tokens), need)
                able = self.breakers.fallback_states(able, model)
                state = choose(able, model, service, prefix, need, kv_aware=self._kv_aware, experts=self.experts)
        else:
            state = choose(states, model, service, prefix, need, context_tokens, self._kv_aware, self.experts)
        return self._clients[state.address], state

    def choose_partner(
        self,
        model: str,
        service: ServiceClass,
        avoid: Collection[Connection],
        context_tokens: int = 0,
        images: ImageRules | None = None,
    ) -> tuple[EngineClient, EngineState]:
        """Return the engine that decodes a request of that class after another one has prefilled it.

        Raises Unavailable.
        """
        states = self._states_but(avoid)
        if images is not None:
            states = engines_with_vision(states, model, images)
        able = capable_engines(states, model, context_tokens)
        allowed_states = self.breakers.allowed_states(able)
        if any(map(can_continue_prefill, allowed_states)):
            state = partner_among(allowed_states, service, self._coming)
        else:
            partners = [engine for engine in able if can_continue_prefill(engine)]
            state = partner_among(partners and self.breakers.fallback_states(partners, model), service, self._coming)
        return self._clients[state.address], state

    def expect(self, address: str) -> Callable[[], None]:
        """Count a request as on its way to that engine, until the returned function is called, once."""
        self._coming[address] += 1

        def no_more() -> None:
            self._coming[address] -= 1
            if not self._coming[address]:
                del self._coming[address]

        return no_more

    def _states_but(self, avoid: Collection[Connection]) -> list[EngineState]:
        return [state for state in self.states() if state.connection not in avoid]

    async def wait_change(self, timeout_s: float) -> None:
        """Wait until an engine has joined or left, or for the timeout."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def card(self, model: str, allowed: frozenset[str] | None, *, has_images: bool = False) -> ModelCard:
        """Return the card of an engine that can take a request. Raises NotFound or Unavailable.

        The key may use the models `allowed`, None meaning all. For a prompt with images it is an engine that sees, if
        there is one.
        """
        return card_of(self.states(), model, allowed, has_images=has_images)

    def cards(self) -> dict[str, ModelCard]:
        """Return the card of every model that an engine has reported, by name; of healthy engines where possible.

        A model that can have no running engine keeps its last card.
        """
        stopped = {model: card for model, card in self._stopped_cards.items() if model in self.stopped_models}
        return stopped | cards_of(self.states())

    def have_settled_for(self, replica_id: str, seconds: float) -> bool:
        """Return whether every engine holds nothing of a gateway process that was silent for so long.

        False while an engine is missing, or a retired engine could still hold something.
        """
        states = self.states()
        if not states or self.missing or self._retired or self._replaced:
            return False
        return all(state.has_settled_for(replica_id, seconds) for state in states)

    def why_not_ready(self) -> list[str]:
        """Return a reason per engine, or nothing if at least one can take a request, sleeps or is started by requests.

        A gateway whose engines sleep or are stopped must count as ready, otherwise no client could reach it to wake
        them. It does not if an engine is lost that no request starts.
        """
        states = self.states()
        if any(state.healthy and not state.draining for state in states):
            return []
        if self.stopped_models and not self._has_lost_engine(states):
            return []
        if not states and not self.missing:
            return ["no engine is configured; set MOIETY_ENGINES to the address of an engine"]
        reasons = [f"engine {state.address}: {state.reason or 'draining'}" for state in states]
        return reasons + [f"engines {name}: {why}" for name, why in self.missing.items()]

    def _has_lost_engine(self, states: Sequence[EngineState]) -> bool:
        """Return whether one of these engines, none of which serves, is not of a model that can have no running engine.

        An engine or a name whose model is not known yet counts as the engine of such a model, one for each model.
        """
        if any(state.card is not None and state.card.model not in self.stopped_models for state in states):
            return True
        return sum(state.card is None for state in states) + len(self.missing) > len(self.stopped_models)

    def set_asleep(self, engine_id: str, *, asleep: bool) -> EngineState:
        """Send an engine to sleep or wake it; return its state before. Raises NotFound, Unavailable or Conflict."""
        client = self._client_of(engine_id)
        state = client.state
        client.set_asleep(asleep=asleep)
        return state

    def scale_expert_ranks(self, engine_id: str, num_ranks: int) -> EngineState:
        """Let an engine change its number of expert ranks; return its state before.

        Raises NotFound, Unavailable or Conflict.
        """
        client = self._client_of(engine_id)
        state = client.state
        client.scale_expert_ranks(num_ranks)
        return state

    def _client_of(self, engine_id: str) -> EngineClient:
        """Return the connection to an engine. Raises NotFound."""
        for client in self._clients.values():
            card = client.state.card
            if card is not None and card.engine_id == engine_id:
                return client
        raise NotFound(
            f"there is no engine {engine_id[:256]!r}; GET /admin/v1/engines lists them by their card's engine_id"
        )

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
