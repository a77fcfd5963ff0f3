"""Puts idle engines to sleep, wakes them for requests, and lets these requests wait.

Each gateway process has one. Gateways write their waiting requests into the database, and the one that holds the lease
decides for all of them, so that concurrent requests wake an engine once. When the database is away nothing is decided:
requests wait until their time is over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from itertools import count
from typing import TypeVar

import msgspec
import structlog

from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import Conflict, EnginesAsleep, Unavailable
from moiety_platform.live_settings import LiveSettings, PreparedChange
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.routing.replicas import Replicas
from moiety_platform.wake_on_request.activity import ActivityLog
from moiety_platform.wake_on_request.engine_pools import EnginePools, PoolScaler
from moiety_platform.wake_on_request.plan import ModelDemand, SleepView, WakeTerms, expected_wait_s, plan_sleep
from moiety_platform.wake_on_request.store import (
    WakeKind,
    claim_lease,
    end_switches,
    note_time,
    put_demands,
    put_switches,
    read_demands,
    read_switches,
    read_times,
    release_lease,
)
from moiety_platform.wake_settings import WakeSettings
from moiety_wire.engine_load import SleepState
from moiety_wire.roles import EngineRole

POLL_S, FAST_POLL_S = 1.0, 0.05  # without and with waiting requests
DECIDE_S = 0.5  # between two transactions of a gateway with waiting requests
LEASE_S = 3.0
DEMAND_S = 5.0  # how long a demand counts after its gateway last wrote it
ANNOUNCE_S = 1.0  # between two decisions that requests for a model bring about
NOTE_S = 30.0  # how long a request that does not wait counts as a demand
MAX_NOTES = 1000  # of a model; the newest count
COMMAND_S = 5.0  # after which a command that an engine has not followed is sent again
WAKE_SETTINGS = tuple(WakeSettings.model_fields)

S = TypeVar("S", bound=WakeSettings)

log = structlog.get_logger(__name__)


class _Demand(msgspec.Struct):
    """Requests of this process for one model. Times are of the monotonic clock."""

    since_s: float  # since when the model is needed and has no awake engine
    num_waiting: int = 0
    slo_s: float = math.inf  # when the first request misses its SLO
    announced_s: float = -math.inf  # when a decision about it was last asked for
    notes: dict[int, float] = {}  # of requests that do not wait, the oldest first: until when each counts

    @property
    def noted_until_s(self) -> float:
        """Time until which any request that does not wait counts."""
        return next(reversed(self.notes.values()), 0.0)


class EngineWaker:
    """Waker of one gateway process. Owned by the entry point; for one event loop."""

    def __init__(
        self,
        owner: str,
        database: Database,
        replicas: Replicas,
        clock: Clock,
        settings: WakeSettings,
        open_scaler: Callable[[], PoolScaler],
    ) -> None:
        """Create the waker. `open_scaler` is called if settings name StatefulSets; it raises CannotApplySetting."""
        self._owner, self._database, self._replicas, self._clock = owner, database, replicas, clock
        self._pools = EnginePools(settings, open_scaler, clock, self._count_wake)
        self.settings = settings
        replicas.stopped_models = settings.stopped_models
        self._demands: dict[str, _Demand] = {}
        self._note_numbers = count()
        self._all_demands: list[ModelDemand] = []  # of all gateways, as last read
        self._activity = ActivityLog(self._note_awake)
        self._engines: list[SleepView] = []
        self._times: dict[WakeKind, dict[str, float]] = {kind: {} for kind in WakeKind}
        self._measured: list[tuple[str, WakeKind, float]] = []  # times that are not in the database yet
        self._switches: set[str] = set()  # engines that gave way, by the database, and that this process knows
        self._holds_lease = self._has_written = self._is_new = self._is_unread = False
        self._decided_s = -math.inf
        self._failure = ""  # why nothing could be decided lately
        self._decided_for: list[tuple[str, SleepState]] = []  # states of the engines at the last decision
        self._changed = asyncio.Event()  # replaced each time that it is set
        self.num_wakes: dict[str, int] = {}
        self.num_rejected: dict[str, int] = {}
        self._rounds = PeriodicTask("wake-on-request", self.round, POLL_S)

    async def start(self) -> None:
        self._rounds.start()
        await self._pools.start()

    async def stop(self) -> None:
        """Stop, and give the lease back. Idempotent."""
        await self._rounds.stop()
        await self._pools.stop()
        if self._holds_lease or self._has_written:
            self._holds_lease = self._has_written = False
            try:
                async with self._database.write() as session:
                    await put_demands(session, self._owner, [], 0)
                    await release_lease(session, self._owner)
            except Unavailable as error:
                log.warning("wake_lease_kept", reason=str(error), advice="none needed: the lease expires in seconds")

    def followed_by(self, live: LiveSettings[S]) -> None:
        live.follow_with(WAKE_SETTINGS, self._prepare)

    async def _prepare(self, settings: S) -> PreparedChange:
        commit_pools = self._pools.prepare(settings)

        def commit() -> None:
            self.settings = settings
            commit_pools()
            self._replicas.stopped_models = settings.stopped_models
            self._rounds.wake()

        return PreparedChange(commit)

    # ── requests ──

    def is_asleep(self, model: str) -> bool:
        """Return whether a request for the model can wait for an engine that is woken or started for it."""
        if not self.settings.wake_on_request:
            return False
        states = self._states(model)
        if not states:
            return model in self.settings.stopped_models
        awake = {_role(state) for state in states if state.sleep is SleepState.AWAKE}
        return any(_role(state) not in awake for state in states)

    def can_serve(self, model: str) -> bool:
        """Return whether an engine of each role takes requests."""
        states = self._states(model)
        able = {_role(state) for state in states if state.can_take}
        return bool(states) and all(_role(state) in able for state in states)

    def can_wake(self, model: str, allowed: frozenset[str] | None) -> bool:
        """Return whether a key that may use the models `allowed`, None meaning all, can wake an engine of the model."""
        return (allowed is None or model in allowed) and self.is_asleep(model)

    def note_request(self, model: str) -> EnginesAsleep:
        """Wake an engine of a model whose engines sleep, and return the error of the request.

        The request need not wait: it may have a fallback. If it waits, the error's note no longer counts.
        """
        note = self._note_demand(model)
        retry_after_s = max(1, math.ceil(self.expected_s(model)))
        message = f"all engines for {model!r} sleep, and one is being woken; try again in {retry_after_s} s"
        return EnginesAsleep(message, model, retry_after_s=retry_after_s, note=note)

    async def wait_awake(self, model: str, slo_s: float, note: int | None = None) -> None:
        """Wait until an engine of the model takes requests. `slo_s` is the time until the request misses its SLO.

        `note` is the request's note, which ends, so that a request that leaves counts no longer. Raises Unavailable
        with the time after which to try again, at once if the predicted wait exceeds the limit; the request then counts
        for a while, since clients try again.
        """
        timeout_s = self.settings.wake_timeout_s
        expected_s = self.expected_s(model)
        if expected_s > timeout_s and not self.can_serve(model):
            self._count_rejected(model)
            self._note_demand(model)
            raise EnginesAsleep(
                f"all engines for {model!r} sleep, and one is expected to be awake in {math.ceil(expected_s)} s, which "
                f"is more than requests wait ({timeout_s:g} s); try again later",
                model,
                retry_after_s=math.ceil(expected_s),
            )
        now_s = self._clock.monotonic()
        demand = self._demand_of(model)
        if note is not None:
            demand.notes.pop(note, None)
        demand.num_waiting += 1
        demand.slo_s = min(demand.slo_s, now_s + slo_s)
        if demand.num_waiting == 1:
            self._rounds.wake()  # rounds are frequent from now on
        self._announce(demand)
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        until_s = begin_s + timeout_s
        is_first_start = not self._states(model) and demand.num_waiting == 1
        try:
            while not self.can_serve(model):
                left_s = until_s - loop.time()
                if left_s <= 0:
                    self._count_rejected(model)
                    self._note_demand(model)
                    why = self._failure or "try again later"
                    raise EnginesAsleep(
                        f"no engine for {model!r} was awake within {timeout_s:g} s; {why}",
                        model,
                        retry_after_s=max(1, math.ceil(self.expected_s(model))),
                    )
                await self._wait_change(left_s)
            if is_first_start and model not in self.settings.scaled_statefulsets:
                self._measured.append((model, WakeKind.START, loop.time() - begin_s))
        finally:
            demand.num_waiting -= 1
            if not demand.num_waiting:
                demand.slo_s = math.inf

    def expected_s(self, model: str) -> float:
        """Return the predicted time until an engine of the model is awake; a time never measured counts as 0."""
        if not self._states(model):
            return self._times[WakeKind.START].get(model, 0.0)
        demands = {one.model: one for one in self._all_demands} | {one.model: one for one in self._own_demands()}
        return expected_wait_s(model, self._engines, list(demands.values()), self._terms())

    def waiting(self) -> dict[str, int]:
        """Return the number of this process's waiting requests, for each model that can sleep or be stopped."""
        models = {one.model for one in self._engines} | self.settings.stopped_models | self._demands.keys()
        return {model: self._num_waiting(model) for model in sorted(models)} if self.settings.wake_on_request else {}

    @property
    def is_ready(self) -> bool:
        """Readiness of the gateway: an engine serves, sleeps or can be started by a request."""
        return not self._replicas.why_not_ready()

    def demands(self) -> dict[str, int]:
        """Return this process's demand for each model: its waiting requests, and 1 if others have asked for it lately.

        Others are batch lines, requests of routes with a fallback, and rejected requests: they do not wait.
        """
        found, now_s = self.waiting(), self._clock.monotonic()
        for model, num_waiting in found.items():
            demand = self._demands.get(model)
            if demand is not None and demand.noted_until_s > now_s and self.is_asleep(model):
                found[model] = max(1, num_waiting)
        return found

    def measured(self) -> dict[WakeKind, dict[str, float]]:
        """Return the measured times in seconds, by kind and model."""
        return self._times

    # ── rounds ──

    async def round(self) -> None:
        """Observe the engines, and decide if there may be something to do. Raises Unavailable."""
        settings, now_s = self.settings, self._clock.monotonic()
        if not settings.wake_on_request:
            self._rounds.every_s = POLL_S
            return
        self._engines = self._activity.observe(self._replicas.states(), now_s)
        for model, seconds in self._pools.note_ready(self._can_take, now_s):
            self._measured.append((model, WakeKind.START, seconds))
        self._changed.set()
        self._changed = asyncio.Event()
        own = self._own_demands()
        self._rounds.every_s = FAST_POLL_S if any(one.num_waiting for one in self._demands.values()) else POLL_S
        seen = [(one.address, one.sleep) for one in self._engines]
        if seen != self._decided_for and self._has_groups():
            self._is_unread = True  # another gateway may have brought about the change, and be gone
        is_due = self._is_new or seen != self._decided_for or now_s - self._decided_s >= DECIDE_S
        has_news = own or self._holds_lease or self._has_written or self._measured or self._is_unread
        if not is_due or not (has_news or self._may_act(now_s)):
            return
        self._is_new, self._decided_s, self._decided_for = False, now_s, seen
        try:
            await self._decide(own, now_s)
        except Unavailable as error:
            self._failure = error.message
            raise
        self._failure = ""

    async def _decide(self, own: list[ModelDemand], now_s: float) -> None:
        measured = list(self._measured)
        async with self._database.write() as session:
            await put_demands(session, self._owner, own, round(DEMAND_S * 1000))
            for model, kind, seconds in measured:
                await note_time(session, model, kind, seconds)
            holds_lease = await claim_lease(session, self._owner, round(LEASE_S * 1000))
            demands = await read_demands(session)
            times = await read_times(session)
            switches = await read_switches(session) if self._has_groups() else {}
            if holds_lease and switches:
                ended = self._activity.ended_switches(self._switches & switches.keys())
                awake = [one.address for one in self._engines if one.sleep is SleepState.AWAKE]
                await end_switches(session, ended, awake)
                switches = {address: model for address, model in switches.items() if address not in ended}
            if holds_lease and not demands:
                await release_lease(session, self._owner)  # so that another gateway's request need not wait for its end
        del self._measured[: len(measured)]  # after the commit, since a failed transaction has stored none
        self._times = dict(times)
        is_new_holder = holds_lease and bool(demands) and not self._holds_lease
        self._has_written, self._holds_lease, self._all_demands = bool(own), holds_lease and bool(demands), demands
        known = self._activity.adopt_switches(switches)
        is_adopted, self._switches, self._is_unread = bool(known - self._switches), known, False
        if not holds_lease:
            self._pools.request_scale((), ())
            return
        if is_adopted or (is_new_holder and self._has_groups()):
            self._is_new = True  # the commands of the last holder may not be in this process's loads yet
            return
        plan = plan_sleep(self._engines, demands, self._terms())
        if begun := {address: model for address, model in plan.gave_way.items() if address not in self._switches}:
            async with self._database.write() as session:  # before the command, so that no switch is unknown
                await put_switches(session, begun)
            self._switches |= begun.keys()
        for address in (*plan.wake, *plan.restore):
            self._command(address, now_s, asleep=False)
        for address in plan.sleep:
            self._command(address, now_s, asleep=True, gave_way_to=plan.gave_way.get(address, ""))
        wanted = {demand.model for demand in demands}
        idle = set(self._pools.idle_models(self._engines, now_s)) - wanted
        self._pools.request_scale({model for model in wanted if not self._states(model)}, idle)

    def _command(self, address: str, now_s: float, *, asleep: bool, gave_way_to: str = "") -> None:
        client = self._replicas.find(address)
        if client is None or self._activity.awaits_command(address, now_s, COMMAND_S, asleep=asleep):
            return
        card = client.state.card
        assert card is not None, "planned by its card"
        try:
            client.set_asleep(asleep=asleep)
        except (Unavailable, Conflict):
            return  # it was lost meanwhile
        self._activity.sent(address, now_s, asleep=asleep, gave_way_to=gave_way_to)
        if not asleep:
            self._count_wake(card.model)
        log.info("engine_put_to_sleep" if asleep else "engine_woken", engine=address, model=card.model)

    def _may_act(self, now_s: float) -> bool:
        """Return whether engines are to sleep, to be woken again or to be stopped, as far as this process knows."""
        plan = plan_sleep(self._engines, self._all_demands, self._terms())
        has_ended = bool(self._activity.ended_switches(self._switches))
        return has_ended or bool(plan.sleep or plan.restore) or bool(self._pools.idle_models(self._engines, now_s))

    def _has_groups(self) -> bool:
        return any(one.group for one in self._engines)

    # ── observations ──

    def _note_awake(self, model: str, seconds: float) -> None:
        self._measured.append((model, WakeKind.WAKE, seconds))

    def _own_demands(self) -> list[ModelDemand]:
        """Return this process's demands, without those that are met."""
        now_s, found = self._clock.monotonic(), []
        for model, demand in list(self._demands.items()):
            is_asleep = self.is_asleep(model)
            if not demand.num_waiting and (demand.noted_until_s <= now_s or not is_asleep):
                del self._demands[model]
                continue
            if not is_asleep:
                demand.since_s = now_s  # its turn has come, and the next wait begins with its end
            slack_s = demand.slo_s - now_s if demand.num_waiting else self.settings.wake_timeout_s
            waited_s = now_s - demand.since_s
            found.append(ModelDemand(model, demand.num_waiting, min(slack_s, 86_400.0), waited_s))
        return found

    def _note_demand(self, model: str) -> int:
        """Count a request that does not wait as a demand, for `NOTE_S`; return the number of the note."""
        demand, note = self._demand_of(model), next(self._note_numbers)
        demand.notes[note] = self._clock.monotonic() + NOTE_S
        if len(demand.notes) > MAX_NOTES:
            del demand.notes[next(iter(demand.notes))]
        self._announce(demand)
        return note

    def _announce(self, demand: _Demand) -> None:
        """Decide at once about a demand, at most once a second, since each decision is a write transaction."""
        now_s = self._clock.monotonic()
        if now_s - demand.announced_s >= ANNOUNCE_S:
            demand.announced_s = now_s
            self._is_new = True
            self._rounds.wake()

    def _demand_of(self, model: str) -> _Demand:
        """Return this process's demand for a model, which begins now if there was none."""
        demand = self._demands.get(model)
        if demand is None:
            demand = self._demands[model] = _Demand(self._clock.monotonic())
        return demand

    def _num_waiting(self, model: str) -> int:
        demand = self._demands.get(model)
        return 0 if demand is None else demand.num_waiting

    def _states(self, model: str) -> list[EngineState]:
        """Return the connected engines of the model that are not shutting down."""
        states = self._replicas.states()
        return [one for one in states if one.healthy and not one.draining and one.card and one.card.model == model]

    def _can_take(self, model: str) -> bool:
        """Return whether any engine of the model takes requests."""
        return any(state.can_take for state in self._states(model))

    def _terms(self) -> WakeTerms:
        settings = self.settings
        return WakeTerms(
            settings.device_group_awake,
            settings.device_group_min_awake_s,
            settings.sleep_after_s,
            self._times[WakeKind.WAKE],
        )

    def _count_wake(self, model: str) -> None:
        self.num_wakes[model] = self.num_wakes.get(model, 0) + 1

    def _count_rejected(self, model: str) -> None:
        self.num_rejected[model] = self.num_rejected.get(model, 0) + 1

    async def _wait_change(self, timeout_s: float) -> None:
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return


def _role(state: EngineState) -> EngineRole:
    return EngineRole.BOTH if state.card is None else state.card.role
