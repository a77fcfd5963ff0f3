"""Shadow traffic: copies of a route's requests to another model, whose answers are discarded.

A copy is not billed and counts under no quota. It delays no other request: it has the class of batches, few run at a
time, and none begins while the model's engines have requests that wait. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace

import msgspec
import structlog

from moiety_platform.classes.terms import BATCH_TIER
from moiety_platform.errors import PlatformError, forget_frames
from moiety_platform.guardrails.terms import ALL_TENANTS
from moiety_platform.inference.generation import Conversation, Generation
from moiety_platform.inference.model_routing import RouteAttempt, StartRequest
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.request_recorder import RequestRecorder
from moiety_platform.metrics import Metrics
from moiety_platform.model_routes.terms import ModelRoute
from moiety_platform.routing.replicas import Replicas

MAX_OPEN = 16  # copies that one gateway has at engines at once
MAX_COPY_S = 600.0
COMPLETED, FAILED, DROPPED = "completed", "failed", "dropped"

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class ShadowTraffic:
    """Copies of requests of one gateway process. For one event loop; close it before engines and recorder."""

    recorder: RequestRecorder
    replicas: Replicas
    metrics: Metrics
    max_open: int = MAX_OPEN
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _is_closed: bool = field(init=False, default=False)

    @property
    def num_open(self) -> int:
        """Number of copies that have not ended."""
        return len(self._tasks)

    def copy(
        self, start: StartRequest, route: ModelRoute, record: RequestRecord, generation: Generation, terms: RouteAttempt
    ) -> None:
        """Copy the route's share of requests to its shadow model. Returns at once, and never raises.

        A request with images or documents is not copied: they would be fetched again.
        """
        model, percent = route.shadow_model, route.shadow_percent
        if model is None or percent is None or _has_files(generation) or random.random() * 100 >= percent:
            return
        if self._is_closed or self.num_open >= self.max_open or not self._is_idle(model):
            self.metrics.observe_shadow(route.name, model, DROPPED)
            return
        copied = msgspec.structs.replace(generation, model=model, service_tier=BATCH_TIER)
        task = asyncio.create_task(
            self._run(start, route.name, self.recorder.copy_of(record), copied, terms), name="shadow-request"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all copies at their engines."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_idle(self, model: str) -> bool:
        """Return whether an engine of the model takes requests and has none that waits."""
        return any(
            state.card is not None
            and state.card.model == model
            and state.can_take
            and not (state.load is not None and state.load.num_waiting)
            for state in self.replicas.states()
        )

    async def _run(
        self, start: StartRequest, route: str, record: RequestRecord, generation: Generation, terms: RouteAttempt
    ) -> None:
        outcome = FAILED
        try:
            async with asyncio.timeout(MAX_COPY_S):
                unchecked = replace(terms.rules, guardrails={ALL_TENANTS: ()})  # the request itself is checked
                attempt = msgspec.structs.replace(terms, rules=unchecked, failover_wait_s=0.0, is_shadow=True)
                async with await start(record, generation, attempt=attempt) as run:
                    async for _ in run:
                        pass
            outcome = COMPLETED
        except (PlatformError, TimeoutError) as exc:
            forget_frames(exc)
            log.info("shadow_request_failed", route=route, model=generation.model, error=str(exc))
        except Exception:  # the root of a task: nobody else would report it
            log.exception("shadow_request_broken", route=route, model=generation.model)
        finally:
            self.metrics.observe_shadow(route, generation.model, outcome)


def _has_files(generation: Generation) -> bool:
    return any(isinstance(one, Conversation) and (one.images or one.documents) for one in generation.prompts)
