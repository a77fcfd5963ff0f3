"""Observations of engines, the disk and SLOs by one gateway."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.alert_watch.terms import Observation
from moiety_platform.alerts.models import AlertSeverity
from moiety_platform.classes.models import ClassRecord
from moiety_platform.engine_client.base import EngineState
from moiety_platform.usage.models import UsageMinute
from moiety_platform.webhooks.terms import EventGroup

OBJECTIVE = 0.99  # target SLO attainment of a class, as of the dashboard and of the chart's alert rules
MIN_REQUESTS = 20  # in the long window; with fewer, one miss is not significant
LONG, SHORT = timedelta(hours=1), timedelta(minutes=5)
CALM = 0.5  # a burn rate below this part of the threshold ends the alert
DISK_CALM_PERCENT = 1.0  # more free space than the threshold that ends the alert
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class EngineObserver:
    """Times since which engines do not respond to this gateway, by a monotonic clock."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._down_since_s: dict[str, float] = {}

    def observe(self, states: Sequence[EngineState], down_after_s: float) -> list[Observation]:
        """Return an observation of each engine: it is down when it has not responded for `down_after_s`."""
        now_s = self._monotonic()
        self._down_since_s = {
            state.address: self._down_since_s.get(state.address, now_s) for state in states if not state.healthy
        }
        found = []
        for state in states:
            model = "unknown" if state.card is None else state.card.model
            details = {"model": model}
            is_bad: bool | None = False
            if state.healthy:
                summary = f"Engine {state.address} responds"
            else:
                down_s = now_s - self._down_since_s[state.address]
                summary = f"Engine {state.address} is down: {state.reason}"
                is_bad = True if down_s >= down_after_s else None
                details["reason"] = state.reason
            found.append(Observation(EventGroup.ENGINE, state.address, is_bad, summary, details=details))
        return found


def observe_disk(folder: Path, min_free_percent: float) -> list[Observation]:
    """Return an observation of the disk of a folder; none if it cannot be read, or with a minimum of 0.

    Its subject is the host with the mount point, which gateways on one disk share.
    """
    if min_free_percent <= 0:
        return []
    try:
        found = os.statvfs(folder)
        mount = _mount_of(folder.resolve())
    except OSError:
        return []
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if not total:
        return []
    percent = 100 * free / total
    is_bad = True if percent < min_free_percent else False if percent >= min_free_percent + DISK_CALM_PERCENT else None
    subject = f"{socket.gethostname()}:{mount}"
    return [
        Observation(
            EventGroup.DISK,
            subject,
            is_bad,
            f"{percent:.1f} % of the disk {subject} is free ({free / 1e9:.1f} GB)",
            AlertSeverity.WARNING,
            {"free_bytes": free, "total_bytes": total},
        )
    ]


def _mount_of(folder: Path) -> Path:
    device = folder.stat().st_dev
    while folder.parent != folder and folder.parent.stat().st_dev == device:
        folder = folder.parent
    return folder


async def observe_slos(session: AsyncSession, now: datetime, max_burn_rate: float) -> list[Observation]:
    """Return an observation of each class: its error budget burns too fast over an hour and over five minutes.

    None with a rate of 0. A class without requests attains its SLO.
    """
    if max_burn_rate <= 0:
        return []
    rates = await _burn_rates(session, now)
    found = []
    for name in await session.scalars(select(ClassRecord.name).order_by(ClassRecord.name)):
        long, short, num_requests = rates.get(name, (0.0, 0.0, 0))
        least = min(long, short)
        is_bad: bool | None = None
        if least >= max_burn_rate and num_requests > MIN_REQUESTS:
            is_bad = True
        elif short < CALM * max_burn_rate:
            is_bad = False
        details = {"burn_rate_1h": round(long, 2), "burn_rate_5m": round(short, 2), "objective": OBJECTIVE}
        summary = f"Class {name} burns its SLO error budget {long:.1f} times as fast as its objective allows"
        if not is_bad:
            summary = f"Class {name} burns its SLO error budget at {short:.1f} times the rate of its objective"
        found.append(Observation(EventGroup.SLO, name, is_bad, summary, details=details))
    return found


async def _burn_rates(session: AsyncSession, now: datetime) -> dict[str, tuple[float, float, int]]:
    """Return the burn rates over both windows and the number of requests of the long one, by class."""
    table, last = UsageMinute, (now - _EPOCH) // timedelta(minutes=1)
    recent = table.minute > last - SHORT // timedelta(minutes=1)
    sums = (
        func.sum(table.num_slo_requests),
        func.sum(table.num_slo_attained),
        func.sum(table.num_slo_requests).filter(recent),
        func.sum(table.num_slo_attained).filter(recent),
    )
    of_hour = select(table.service_class, *sums).where(table.minute > last - LONG // timedelta(minutes=1))
    found = {}
    for name, num, good, recent_num, recent_good in await session.execute(of_hour.group_by(table.service_class)):
        found[name] = _rate(num, good), _rate(recent_num, recent_good), int(num)
    return found


def _rate(num_requests: int | None, num_attained: int | None) -> float:
    """Return the missed share in units of the share that the objective allows."""
    if not num_requests:
        return 0.0
    return (1 - int(num_attained or 0) / int(num_requests)) / (1 - OBJECTIVE)
