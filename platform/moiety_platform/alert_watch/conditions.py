"""Changes of conditions, each reported once by the gateway that makes it. Within the caller's transaction.

A condition that a gateway sees is pending first. Any gateway that sees the opposite deletes it, so an engine that only
one gateway cannot reach is not reported. It fires when no gateway has objected for `CONFIRM_MS`, and is resolved by
the first gateway that sees its end. Gateways that act at the same time change the row once, since each statement names
the state that it changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import CursorResult, delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.alert_watch.terms import ENDS, STARTS, Observation
from moiety_platform.alerts.models import (
    MAX_SUBJECT_LENGTH,
    MAX_SUMMARY_LENGTH,
    AlertCondition,
    AlertSeverity,
    ConditionState,
    OperationalAlert,
)
from moiety_platform.db.dialect import insert_into
from moiety_platform.tenants.checks import new_id
from moiety_platform.webhooks.deliveries import Now, enqueue
from moiety_platform.webhooks.terms import EventGroup

CONFIRM_MS = 15_000  # longer than two rounds of every gateway
SEEN_EVERY_MS = 60_000
LOST_MS = 300_000  # a condition whose subject no gateway knows any more is resolved after this time

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ConditionRow:
    """A row of `alert_conditions`."""

    key: Key
    id: str
    state: str
    since_ms: int
    seen_ms: int


async def read_conditions(session: AsyncSession, now: Now) -> tuple[dict[Key, ConditionRow], int]:
    """Return all conditions by their key, and the time of the database."""
    rows = (await session.scalars(select(AlertCondition))).all()
    found = {
        (row.kind, row.subject): ConditionRow((row.kind, row.subject), row.id, row.state, row.since_ms, row.seen_ms)
        for row in rows
    }
    return found, await session.scalar(select(now())) or 0


def pick_changes(
    observed: Sequence[Observation], rows: Mapping[Key, ConditionRow], now_ms: int
) -> list[tuple[Observation, ConditionRow | None]]:
    """Return the observations that change something, each with the row of its subject."""
    changes: list[tuple[Observation, ConditionRow | None]] = []
    for one in observed:
        row = rows.get(one.key)
        if row is None:
            if one.is_bad:
                changes.append((one, row))
        elif one.is_bad is False or _is_due(row, one, now_ms):
            changes.append((one, row))
    return changes


def _is_due(row: ConditionRow, observation: Observation, now_ms: int) -> bool:
    if row.state == ConditionState.PENDING:
        return observation.is_bad is True and now_ms - row.since_ms >= CONFIRM_MS
    return now_ms - row.seen_ms >= SEEN_EVERY_MS


def pick_lost(observed: Sequence[Observation], rows: Mapping[Key, ConditionRow], now_ms: int) -> list[ConditionRow]:
    """Return the conditions that no gateway has confirmed for long, and whose subject this one does not know."""
    known = {one.key for one in observed}
    return [row for row in rows.values() if row.key not in known and now_ms - row.seen_ms >= LOST_MS]


async def change_condition(
    session: AsyncSession, observation: Observation, row: ConditionRow | None, at: datetime, now: Now
) -> OperationalAlert | None:
    """Apply one observation; return the alert if this gateway has made the condition fire, or resolved it."""
    moment = await session.scalar(select(now())) or 0
    if row is None:
        values = {
            "kind": observation.group.value, "subject": observation.subject[:MAX_SUBJECT_LENGTH], "id": new_id("cnd"),
            "state": ConditionState.PENDING, "since_ms": moment, "seen_ms": moment,
        }  # fmt: skip
        await session.execute(insert_into(session, AlertCondition).values(values).on_conflict_do_nothing())
        return None
    this = AlertCondition.kind == row.key[0], AlertCondition.subject == row.key[1], AlertCondition.id == row.id
    if observation.is_bad is False:
        if not await _changed(session, delete(AlertCondition).where(*this, AlertCondition.state == row.state)):
            return None
        return None if row.state == ConditionState.PENDING else await _report(session, observation, row.id, at, now)
    if row.state == ConditionState.PENDING:
        fire = update(AlertCondition).where(*this, AlertCondition.state == ConditionState.PENDING)
        fired = await _changed(session, fire.values(state=ConditionState.FIRING, seen_ms=moment))
        return await _report(session, observation, row.id, at, now) if fired else None
    await session.execute(update(AlertCondition).where(*this).values(seen_ms=moment))
    return None


async def end_lost(session: AsyncSession, row: ConditionRow, at: datetime, now: Now) -> OperationalAlert | None:
    """Delete a condition that no gateway sees any more; return its alert if it was reported, and was deleted here."""
    this = AlertCondition.kind == row.key[0], AlertCondition.subject == row.key[1], AlertCondition.id == row.id
    if not await _changed(session, delete(AlertCondition).where(*this, AlertCondition.seen_ms == row.seen_ms)):
        return None
    if row.state == ConditionState.PENDING:
        return None
    group = EventGroup(row.key[0])
    summary = f"{row.key[1]} is not observed any more: no gateway knows it"
    gone = Observation(group, row.key[1], is_bad=False, summary=summary, severity=AlertSeverity.INFO)
    return await _report(session, gone, row.id, at, now)


async def _changed(session: AsyncSession, statement: Any) -> bool:
    result = await session.execute(statement.execution_options(synchronize_session=False))
    assert isinstance(result, CursorResult)
    return bool(result.rowcount)


async def _report(
    session: AsyncSession, observation: Observation, condition_id: str, at: datetime, now: Now
) -> OperationalAlert:
    is_start = observation.is_bad is True
    alert = OperationalAlert(
        id=new_id("evt"),
        condition_id=condition_id,
        type=(STARTS if is_start else ENDS)[observation.group].value,
        status="firing" if is_start else "resolved",
        severity=observation.severity.value if is_start else AlertSeverity.INFO.value,
        subject=observation.subject[:MAX_SUBJECT_LENGTH],
        summary=observation.summary[:MAX_SUMMARY_LENGTH],
        details=dict(observation.details),
        at=at,
    )
    session.add(alert)
    await session.flush()
    await enqueue(session, [alert], now, observation.group)
    return alert
