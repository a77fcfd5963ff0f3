"""Queries the engines. Answers are cached briefly, so that many readers cause no more queries."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from moiety_platform.clock import Clock
from moiety_platform.engine_client.base import EngineClient
from moiety_platform.errors import Unavailable
from moiety_platform.experts.sums import LoadSum, sum_loads
from moiety_platform.routing.replicas import Replicas
from moiety_wire.experts import ExpertLoad

KEPT_S = 2.0  # interval at which engines count

Question = tuple[str, int, str | None]  # engine id, minutes, tenant


@dataclass(slots=True)
class ModelLoad:
    """Reports of a model's engines; `num_silent` engines did not answer."""

    engines: dict[str, ExpertLoad] = field(default_factory=dict)  # by engine id
    num_silent: int = 0

    def sum(self) -> LoadSum | None:
        return sum_loads(self.engines.values())


class ExpertService:
    """Owner of the cached answers. For one event loop."""

    def __init__(self, replicas: Replicas, clock: Clock) -> None:
        self._replicas, self._clock = replicas, clock
        self._said: dict[Question, tuple[float, ExpertLoad]] = {}
        self.planning = asyncio.Lock()  # a plan occupies a processor for a while: one at a time

    async def loads(self, minutes: int, tenant_id: str | None, engine_id: str | None = None) -> dict[str, ModelLoad]:
        """Return the loads by model, in the order of their names, without engines that have no expert counts."""
        cards = [(client, client.state.card) for client in self._replicas.clients()]
        asked = [(client, card) for client, card in cards if card and engine_id in (None, card.engine_id)]
        asking = (self._ask(client, card.engine_id, minutes, tenant_id) for client, card in asked)
        answers = await asyncio.gather(*asking)
        found: defaultdict[str, ModelLoad] = defaultdict(ModelLoad)
        for (_, card), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Unavailable):
                found[card.model].num_silent += 1
            elif answer is not None:
                found[card.model].engines[card.engine_id] = answer
        return dict(sorted(found.items()))

    async def _ask(
        self, client: EngineClient, engine_id: str, minutes: int, tenant_id: str | None
    ) -> ExpertLoad | Unavailable | None:
        question, now_s = (engine_id, minutes, tenant_id), self._clock.monotonic()
        self._said = {one: said for one, said in self._said.items() if now_s - said[0] < KEPT_S}
        if question in self._said:
            return self._said[question][1]
        try:
            answer = await client.expert_load(minutes, tenant_id)
        except Unavailable as exc:
            return exc
        if answer is not None:
            self._said[question] = now_s, answer
        return answer
