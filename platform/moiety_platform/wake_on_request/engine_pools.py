"""Start and stop of the StatefulSets of `scaled_models`, in a task of its own: Kubernetes' API can be slow or away.

The waker says which models are needed and which are idle. A StatefulSet that cannot be scaled delays no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec
import structlog

from moiety_platform.backoff import Backoff
from moiety_platform.clock import Clock
from moiety_platform.errors import Unavailable
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.wake_on_request.plan import SleepView
from moiety_platform.wake_settings import WakeSettings

SCALE_S = 1.0  # between two rounds that nothing wakes
RETRIES = Backoff(1.0, 60.0)

log = structlog.get_logger(__name__)


class PoolScaler(Protocol):
    """Replicas of StatefulSets. The methods raise Unavailable when they cannot be asked."""

    async def replicas(self, name: str) -> int:
        """Return the wanted number of replicas."""
        ...

    async def scale(self, name: str, replicas: int) -> None:
        """Set the wanted number of replicas."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class _Refused(msgspec.Struct):
    """Attempts to scale the StatefulSet of a model that failed since the last success."""

    num_attempts: int
    retry_s: float  # monotonic time of the next attempt


class EnginePools:
    """StatefulSets that one gateway process starts and stops. Owned by the waker; for one event loop."""

    def __init__(
        self,
        settings: WakeSettings,
        open_scaler: Callable[[], PoolScaler],
        clock: Clock,
        on_start: Callable[[str], None],
    ) -> None:
        """Create the pools. `open_scaler` raises CannotApplySetting; `on_start` gets the model of a started pool."""
        self._open_scaler, self._clock, self._on_start = open_scaler, clock, on_start
        self._scaler: PoolScaler | None = open_scaler() if settings.scaled_statefulsets else None
        self._settings = settings
        self._needed: frozenset[str] = frozenset()
        self._idle: frozenset[str] = frozenset()
        self._started: dict[str, float] = {}  # when a StatefulSet was scaled up for a model
        self._served_s: dict[str, float] = {}  # when a StatefulSet was last scaled down for a model
        self._refused: dict[str, _Refused] = {}
        self._task = PeriodicTask("engine-pools", self.scale_pools, SCALE_S)

    async def start(self) -> None:
        self._task.start()

    async def stop(self) -> None:
        """Stop at once, and close the connection to the API. Idempotent."""
        await self._task.cancel()
        if self._scaler is not None:
            await self._scaler.close()
            self._scaler = None

    def prepare(self, settings: WakeSettings) -> Callable[[], None]:
        """Return what applies the settings. Raises CannotApplySetting."""
        scaler = self._scaler
        if settings.scaled_statefulsets and scaler is None:
            scaler = self._open_scaler()

        def commit() -> None:
            self._settings, self._scaler = settings, scaler
            self._refused.clear()
            self.request_scale((), ())

        return commit

    def request_scale(self, needed: Collection[str], idle: Collection[str]) -> None:
        """Replace the models whose pools are to be started, since they have no engine, and to be stopped."""
        self._needed, self._idle = frozenset(needed), frozenset(idle)
        if self._needed or self._idle:
            self._task.wake()

    def idle_models(self, engines: Sequence[SleepView], now_s: float) -> list[str]:
        """Return the models whose engines have had no requests for `stop_after_s`."""
        after_s = self._settings.stop_after_s
        found = []
        for model in self._settings.scaled_statefulsets if after_s else ():
            ours = [one for one in engines if one.model == model]
            is_idle = bool(ours) and all(one.idle_s >= after_s for one in ours)
            if is_idle and now_s - self._served_s.get(model, -math.inf) >= after_s:
                found.append(model)
        return found

    def note_ready(self, is_ready: Callable[[str], bool], now_s: float) -> list[tuple[str, float]]:
        """Return the models of started pools that now have an engine, and the times that this took."""
        found = []
        for model, begun_s in list(self._started.items()):
            if is_ready(model):
                del self._started[model]
                found.append((model, now_s - begun_s))
            elif now_s - begun_s > self._settings.wake_timeout_s:
                del self._started[model]  # it is looked at again
        return found

    async def scale_pools(self) -> None:
        """Start the pools that are needed, and stop those that are idle. A failure is logged, and tried again later."""
        for model in sorted(self._needed | self._idle):
            name, scaler = self._settings.scaled_statefulsets.get(model), self._scaler
            refused = self._refused.get(model)
            if name is None or scaler is None or (refused and self._clock.monotonic() < refused.retry_s):
                continue
            try:
                if model in self._needed:
                    await self._start_pool(scaler, model, name)
                else:
                    await self._stop_pool(scaler, model, name)
            except Unavailable as error:
                self._note_refused(model, name, error)
            else:
                self._refused.pop(model, None)

    async def _start_pool(self, scaler: PoolScaler, model: str, name: str) -> None:
        if model in self._started:
            return
        if await scaler.replicas(name) == 0:
            await scaler.scale(name, 1)
            self._on_start(model)
            log.info("engine_pool_started", statefulset=name, model=model)
        self._started[model] = self._clock.monotonic()

    async def _stop_pool(self, scaler: PoolScaler, model: str, name: str) -> None:
        if await scaler.replicas(name) > 0 and model in self._idle:  # a request may have come meanwhile
            await scaler.scale(name, 0)
            log.info("engine_pool_stopped", statefulset=name, model=model)
        self._served_s[model] = self._clock.monotonic()

    def _note_refused(self, model: str, name: str, error: Unavailable) -> None:
        num_attempts = self._refused[model].num_attempts + 1 if model in self._refused else 1
        after_s = RETRIES.after(num_attempts - 1)
        self._refused[model] = _Refused(num_attempts, self._clock.monotonic() + after_s)
        log.warning(
            "engine_pool_not_scaled",
            statefulset=name,
            model=model,
            reason=str(error),
            retry_after_s=round(after_s, 1),
            advice="follow the reason; requests for this model wait until wake_timeout_s, others are not affected",
        )
