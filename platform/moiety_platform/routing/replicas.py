"""The engines this gateway is connected to. Owns their clients; starts and stops them together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from moiety_platform.engine_client.base import EngineClient, EngineState
from moiety_platform.errors import NotFound
from moiety_platform.routing.choose import MODEL_NOT_FOUND, choose, model_not_found
from moiety_wire.classes import ServiceClass
from moiety_wire.messages import Card, ClassLoad


class Replicas:
    """All configured engines, connected or not, in the order of the settings."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self._clients = {client.address: client for client in clients}

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(client.start() for client in self._clients.values()))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    def states(self) -> list[EngineState]:
        return [client.state for client in self._clients.values()]

    def choose(self, model: str, service: ServiceClass) -> tuple[EngineClient, ClassLoad | None]:
        """The client to submit a request of that class to, and what its engine said of the class lately. Raises
        NotFound or Unavailable."""
        state = choose(self.states(), model, service)
        return self._clients[state.address], state.class_load(service.name)

    def card(self, model: str, allowed: frozenset[str] | None) -> Card:
        """The card of an engine that can take a request, for a key that may use the models `allowed`, None being all.
        Raises NotFound or Unavailable."""
        if allowed is not None and model not in allowed:
            served = sorted(allowed & self.cards().keys())
            raise NotFound(model_not_found(model[:256], served), code=MODEL_NOT_FOUND, param="model")
        card = choose(self.states(), model).card
        assert card is not None, "choose returns engines that have a card"
        return card

    def cards(self) -> dict[str, Card]:
        """The card of every model that some engine has shown, by model name; of healthy engines where possible."""
        ordered = sorted(self.states(), key=lambda state: state.healthy)
        return {state.card.model: state.card for state in ordered if state.card is not None}

    def why_not_ready(self) -> list[str]:
        """Empty if at least one engine can take a request, else a reason an engine."""
        states = self.states()
        if any(state.healthy and not state.draining for state in states):
            return []
        if not states:
            return ["no engine is configured; set MOIETY_ENGINES to the address of an engine front"]
        return [f"engine {state.address}: {state.reason or 'draining'}" for state in states]
