"""Limits of the machine that a process meets: space on the disk of its data, and open files.

Both are reported in the log when they are reached and when they are left, at /readyz as warnings, and as metrics.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.supervisor_status import read_status

MIN_FREE_BYTES = 64 * 1024 * 1024  # below, the disk counts as full: a database needs some space for each transaction
FULL_FILES = 0.95  # of the limit of open files
CHECK_EVERY_S = 1.0

log = structlog.get_logger(__name__)


class MachineLimits:
    """Watch over the disk of a data directory and over the open files of this process. For one event loop."""

    def __init__(self, data_dir: Path, *, min_free_bytes: int = MIN_FREE_BYTES) -> None:
        self._data_dir = data_dir
        self._min_free_bytes = min_free_bytes
        self._told: frozenset[str] = frozenset()
        self._rounds = PeriodicTask("machine_limits", self.check, CHECK_EVERY_S)

    async def start(self) -> None:
        self._rounds.start()

    async def stop(self) -> None:
        """Stop watching. Idempotent."""
        await self._rounds.cancel()

    def warnings(self) -> list[str]:
        """Return the limits that are reached now, each with its remedy; empty if there is none."""
        return list(self._reached().values())

    async def check(self) -> None:
        """Log limits that were reached since the last check, and those that are not reached any more."""
        reached = self._reached()
        for event in reached.keys() - self._told:
            log.error(event, reason=reached[event])
        for event in self._told - reached.keys():
            log.info(f"{event}_no_longer")
        self._told = frozenset(reached)

    def _reached(self) -> dict[str, str]:
        """Return the event and the description of each limit that is reached."""
        found = {}
        if (free := free_bytes(self._data_dir)) is not None and free < self._min_free_bytes:
            found["disk_full"] = (
                f"the disk of {self._data_dir} is full ({free} bytes free): usage and logs cannot be written; "
                "free some space on it"
            )
        if are_files_used_up():
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            found["open_files_used_up"] = (
                f"nearly all of the {limit} open files that are allowed are in use: connections are refused; "
                "raise the limit (ulimit -n) and start again"
            )
        return found


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes on the disk of a folder; None if the folder cannot be read."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def are_files_used_up() -> bool:
    """Return whether this process can open few further files, or none.

    The kernel gives the lowest free descriptor, which is near the number of open files.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        fd = os.dup(2)
    except OSError as exc:
        return exc.errno in (errno.EMFILE, errno.ENFILE)
    os.close(fd)
    return limit != resource.RLIM_INFINITY and fd >= FULL_FILES * limit


class MachineCollector(Collector):
    """Prometheus collector of the disk of a data directory, and of the counts of `moiety serve`, if it runs."""

    def __init__(self, data_dir: Path, supervisor_status: Path | None) -> None:
        self._data_dir = data_dir
        self._supervisor_status = supervisor_status

    def collect(self) -> Iterator[Metric]:
        free = free_bytes(self._data_dir)
        if free is not None:
            yield GaugeMetricFamily(
                "moiety_data_dir_free_bytes", "Free space on the disk of the data directory, in bytes.", free
            )
        yield GaugeMetricFamily(
            "moiety_open_files_used_up",
            "1 while this process has nearly as many open files as it is allowed, and refuses connections.",
            are_files_used_up(),
        )
        if self._supervisor_status is not None:
            yield from self._supervisor_counts(self._supervisor_status)

    def _supervisor_counts(self, path: Path) -> Iterator[Metric]:
        try:
            restarts, lost = read_status(path)
        except (OSError, ValueError):  # the next scrape reads it again
            return
        family = CounterMetricFamily(
            "moiety_serve_restarts",
            "Restarts of processes of `moiety serve` by reason: `exit` (it ended) or `hang` (it did not respond).",
            labels=["process", "reason"],
        )
        for process, reason, count in restarts:
            family.add_metric([process, reason], count)
        yield family
        family = CounterMetricFamily(
            "moiety_serve_lost_output_bytes",
            "Output of processes of `moiety serve` that could not be written to their logs, in bytes.",
            labels=["process"],
        )
        for process, count in lost:
            family.add_metric([process], count)
        yield family
