"""Watches the configuration file of one process and applies its changes.

A file that is still being written is read later; an invalid file changes nothing, and is reported in the log, by
metrics and by the admin API.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge
from pydantic_settings import BaseSettings

from moiety_platform.live_settings import CannotApplySetting, LiveSettings
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.reloading.shown import shown
from moiety_platform.reloading.source import BadSettings, SettingsSource, mark_of

POLL_INTERVAL_S = 1.0

S = TypeVar("S", bound=BaseSettings)

log = structlog.get_logger(__name__)


class ReloadMetrics:
    """Reload metrics of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._taken = Counter(
            "moiety_config_reloads", "Successful reloads of the configuration file.", registry=registry
        )
        self._failed = Counter(
            "moiety_config_reload_failed",
            "Failed reloads of an invalid configuration file; the log has the error.",
            registry=registry,
        )
        self._successful = Gauge(
            "moiety_config_last_reload_successful",
            "1 if the last reload of the configuration file succeeded, 0 if it failed.",
            registry=registry,
        )
        self._waiting = Gauge(
            "moiety_config_settings_waiting",
            "Changed settings in the configuration file that need a restart.",
            registry=registry,
        )
        self._successful.set(1)

    def taken(self, num_waiting: int) -> None:
        self._taken.inc()
        self._successful.set(1)
        self._waiting.set(num_waiting)

    def failed(self) -> None:
        self._failed.inc()
        self._successful.set(0)


@dataclass(frozen=True, slots=True)
class ReloadStatus:
    """State of the reload: time of the last application, reason why not since, and values that wait for a restart."""

    taken_at: datetime
    problem: str = ""
    waiting: dict[str, Any] = field(default_factory=dict)


class Reloader(Generic[S]):
    """Watcher of the configuration file. Owned by the entry point; for one event loop."""

    def __init__(
        self,
        source: SettingsSource[S],
        live: LiveSettings[S],
        metrics: ReloadMetrics,
        *,
        beside: Callable[[S], Collection[Path]] = lambda _: (),
        every_s: float = POLL_INTERVAL_S,
    ) -> None:
        """`beside` returns files that the settings name and that are read again with them."""
        assert source.path is not None, "there is a file to watch"
        self._path = source.path
        self._source = source
        self.standing = ReloadStatus(datetime.now(UTC))
        self._live = live
        self._metrics = metrics
        self._beside = beside
        self._taken = self._seen = (*source.mark, *mark_of(beside(live.now)))
        self._is_asked = False
        self._rounds = PeriodicTask("settings", self.check_file, every_s)

    async def start(self) -> None:
        self._rounds.start()

    async def stop(self) -> None:
        """Stop watching. Idempotent."""
        await self._rounds.cancel()

    def ask(self) -> None:
        """Read the file at once, whether it has changed or not."""
        self._is_asked = True
        self._rounds.wake()

    async def check_file(self) -> None:
        """Apply a change that stayed the same between two checks, or one that `ask` requested."""
        asked, self._is_asked = self._is_asked, False
        mark = await asyncio.to_thread(self._mark)
        rests, self._seen = mark == self._seen, mark
        if asked or (rests and mark != self._taken):
            await self._reload()

    def _mark(self) -> tuple[Any, ...]:
        return mark_of([self._path, *self._beside(self._live.now)])

    async def _reload(self) -> None:
        mark = await asyncio.to_thread(self._mark)
        try:
            wanted = await asyncio.to_thread(self._source.read)
            if await asyncio.to_thread(self._mark) != mark:
                self._is_asked = False
                return  # written during the read: the next check reads it again
            changes = await self._live.change(wanted)
        except (BadSettings, CannotApplySetting) as error:
            self._fail(str(error))
        except Exception as error:  # a defect in the code must neither be reported as the file's, nor end the watching
            log.exception("config_reload_crashed")
            self._fail(f"it could not be applied: {type(error).__name__}; see the log")
        else:
            waiting = {name: after for name, (_, after) in changes.at_restart.items()}
            self.standing = ReloadStatus(datetime.now(UTC), waiting=waiting)
            self._metrics.taken(len(waiting))
            told = {name: shown(after) for name, (_, after) in changes.at_once.items()}
            log.info("config_reloaded", file=str(self._path), changed=told, waits_for_restart=sorted(waiting))
        self._taken = (mark[0], *mark_of(self._beside(self._live.now)))

    def _fail(self, problem: str) -> None:
        self.standing = ReloadStatus(self.standing.taken_at, problem, self.standing.waiting)
        self._metrics.failed()
        log.error(
            "config_reload_failed",
            file=str(self._path),
            reason=problem,
            advice="correct the file; the previous configuration stays in effect",
        )


@asynccontextmanager
async def watching(reloader: Reloader[S] | None) -> AsyncIterator[None]:
    """Watch the file; SIGHUP reloads it at once. Without a reloader the signal ends the process, as by default."""
    if reloader is None:
        yield
        return
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
    await reloader.start()
    try:
        yield
    finally:
        await reloader.stop()
