"""Watch of one gateway over engines, its disk and SLOs: one background task.

Every few seconds it compares what it sees with the conditions in the database. Without a change it only reads. Requests
are not delayed. When the database is down it waits and continues later; no alert is sent meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Self

import structlog

from moiety_platform.alert_watch.conditions import (
    LOST_MS,
    change_condition,
    end_lost,
    pick_changes,
    pick_lost,
    read_conditions,
)
from moiety_platform.alert_watch.observers import EngineObserver, observe_disk, observe_slos
from moiety_platform.alert_watch.terms import Observation
from moiety_platform.clock import Clock
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.engine_client.base import EngineState
from moiety_platform.live_settings import LiveSettings
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.settings import GatewaySettings
from moiety_platform.webhooks.deliveries import Now

INTERVAL_S = 5.0
SLO_INTERVAL_S = 60.0  # its sums are of minutes

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AlertThresholds:
    """Bounds of the conditions; 0 turns a condition off."""

    engine_down_s: float
    disk_free_percent: float
    slo_burn_rate: float

    @classmethod
    def of(cls, settings: GatewaySettings) -> Self:
        return cls(settings.alert_engine_down_s, settings.alert_disk_free_percent, settings.alert_slo_burn_rate)


@dataclass(eq=False, repr=False)
class AlertWatch:
    """Periodic watch. Owned by the entry point; for one event loop.

    `has_conditions` returns whether conditions are stored; without it, each round reads them.
    """

    database: Database
    states: Callable[[], Sequence[EngineState]]
    data_dir: Path
    clock: Clock
    thresholds: AlertThresholds
    _: KW_ONLY
    interval_s: float = INTERVAL_S
    slo_interval_s: float = SLO_INTERVAL_S
    now: Now = now_ms
    has_conditions: Callable[[], Awaitable[bool]] | None = None

    def __post_init__(self) -> None:
        self._rounds = PeriodicTask("alert-watch", self.round, self.interval_s)
        self._engines = EngineObserver(self.clock.monotonic)
        self._slos: list[Observation] = []
        self._slos_at_s: float | None = None
        self._began_s = self.clock.monotonic()

    def followed_by(self, live: LiveSettings[GatewaySettings]) -> None:
        live.follow(["alert_engine_down_s", "alert_disk_free_percent", "alert_slo_burn_rate"], self.use)

    def use(self, settings: GatewaySettings) -> None:
        """Apply the bounds of the settings from the next round on."""
        self.thresholds = AlertThresholds.of(settings)
        self._slos_at_s = None

    async def start(self) -> None:
        self._rounds.start()

    async def stop(self) -> None:
        """Stop after the running round. Idempotent."""
        await self._rounds.stop()

    async def round(self) -> int:
        """Compare what this gateway sees with the conditions; return the number of new alerts. Raises Unavailable."""
        observed = self._observe_here()
        if self._are_slos_due():
            async with self.database.read() as session:
                self._slos = await observe_slos(session, self.clock.now(), self.thresholds.slo_burn_rate)
            self._slos_at_s = self.clock.monotonic()
        observed += self._slos
        is_all_well = not any(one.is_bad for one in observed)
        if is_all_well and self.has_conditions is not None and not await self.has_conditions():
            return 0
        async with self.database.read() as session:
            rows, moment = await read_conditions(session, self.now)
        changes = pick_changes(observed, rows, moment)
        watched_ms = (self.clock.monotonic() - self._began_s) * 1000
        lost = pick_lost(observed, rows, moment) if watched_ms >= LOST_MS else []
        if not changes and not lost:
            return 0
        at = self.clock.now()
        async with self.database.write() as session:
            alerts = [
                await change_condition(session, one, row, at, self.now)
                for one, row in sorted(changes, key=lambda change: change[0].key)  # gateways do not deadlock
            ]
            alerts += [await end_lost(session, row, at, self.now) for row in sorted(lost, key=lambda row: row.key)]
        told = [alert for alert in alerts if alert is not None]
        for alert in told:
            log.info("operational_alert", alert_type=alert.type, subject=alert.subject, summary=alert.summary)
        return len(told)

    def _observe_here(self) -> list[Observation]:
        bounds = self.thresholds
        observed = observe_disk(self.data_dir, bounds.disk_free_percent)
        if bounds.engine_down_s > 0:
            observed += self._engines.observe(self.states(), bounds.engine_down_s)
        return observed

    def _are_slos_due(self) -> bool:
        return self._slos_at_s is None or self.clock.monotonic() - self._slos_at_s >= self.slo_interval_s
