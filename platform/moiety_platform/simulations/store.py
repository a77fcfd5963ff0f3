"""Table of simulations within the caller's transaction: one simulation runs at a time, on any gateway."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, delete, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.now import now_ms
from moiety_platform.errors import Conflict, NotFound
from moiety_platform.simulations.models import SimulationRecord
from moiety_platform.simulations.schemas import Compared, SimulationView
from moiety_platform.tenants.checks import is_id

KEPT_MS = 24 * 3600 * 1000
MAX_LISTED = 20
ROWS_AT_ONCE = 100
SILENT_MS = 15_000
GATEWAY_GONE = "the gateway that ran it no longer exists; start the simulation again"
BUSY = "Another simulation is running, and only one can run at a time: wait for its end, or cancel it."

Now = Callable[[], ColumnElement[int]]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


async def claim(session: AsyncSession, simulation_id: str, settings: dict[str, Any], now: Now = now_ms) -> int:
    """Claim the slot of the running simulation; return the time. Raises Conflict while another one runs."""
    moment = int(await session.scalar(select(now())) or 0)
    running = update(SimulationRecord).where(SimulationRecord.slot.is_not(None))
    silent = running.where(SimulationRecord.alive_ms < moment - SILENT_MS)
    await session.execute(silent.values(slot=None, state="failed", problem=GATEWAY_GONE))
    made = SimulationRecord(
        id=simulation_id, slot=1, state="running", created_ms=moment, alive_ms=moment, settings=settings
    )
    session.add(made)
    try:
        await session.flush()
    except IntegrityError as exc:
        raise Conflict(BUSY, code="simulation_running") from exc
    return moment


async def beat(session: AsyncSession, simulation_id: str, now: Now = now_ms) -> bool:
    """Send a heartbeat; return False where it was cancelled meanwhile or counts as dead."""
    mine = update(SimulationRecord).where(SimulationRecord.id == simulation_id, SimulationRecord.slot.is_not(None))
    return await session.scalar(mine.values(alive_ms=now()).returning(SimulationRecord.id)) is not None


async def finish(
    session: AsyncSession,
    simulation_id: str,
    state: str,
    *,
    result: Compared | None = None,
    problem: str | None = None,
) -> bool:
    """Release the slot and store the result; return False where the slot was already released."""
    values = {"slot": None, "state": state, "problem": problem}
    values["result"] = None if result is None else msgspec.to_builtins(result)
    mine = update(SimulationRecord).where(SimulationRecord.id == simulation_id, SimulationRecord.slot.is_not(None))
    return await session.scalar(mine.values(values).returning(SimulationRecord.id)) is not None


async def find(session: AsyncSession, simulation_id: str, now: Now = now_ms) -> SimulationView:
    """Return the simulation. Raises NotFound."""
    could_be = is_id(simulation_id)
    record = await session.get(SimulationRecord, simulation_id, populate_existing=True) if could_be else None
    if record is None:
        raise NotFound("No simulation of the last day has this id; list them with GET /admin/v1/simulations.")
    return view_of(record, int(await session.scalar(select(now())) or 0))


async def find_last(session: AsyncSession, now: Now = now_ms) -> list[SimulationView]:
    """Return the last simulations, newest first."""
    newest = select(SimulationRecord).order_by(SimulationRecord.created_ms.desc(), SimulationRecord.id.desc())
    moment = int(await session.scalar(select(now())) or 0)
    return [view_of(record, moment) for record in await session.scalars(newest.limit(MAX_LISTED))]


async def purge(session: AsyncSession, now: Now = now_ms) -> int:
    """Delete some expired simulations; return their number."""
    old = select(SimulationRecord.id).where(
        SimulationRecord.created_ms < now() - KEPT_MS, SimulationRecord.slot.is_(None)
    )
    ids = list(await session.scalars(old.limit(ROWS_AT_ONCE).with_for_update(skip_locked=True)))
    if ids:
        await session.execute(delete(SimulationRecord).where(SimulationRecord.id.in_(ids)))
    return len(ids)


def view_of(record: SimulationRecord, moment_ms: int) -> SimulationView:
    is_dead = record.state == "running" and record.alive_ms < moment_ms - SILENT_MS
    return SimulationView(
        id=record.id,
        state="failed" if is_dead else record.state,
        created_at=_EPOCH + timedelta(milliseconds=record.created_ms),
        settings=record.settings,
        result=None if record.result is None else msgspec.convert(record.result, Compared),
        problem=GATEWAY_GONE if is_dead else record.problem,
    )
