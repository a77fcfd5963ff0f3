"""Waiting requests of all gateways, the lease of the gateway that decides, its switches, and measured wake times.

All of them within the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from sqlalchemy import and_, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.dialect import insert_into
from moiety_platform.db.now import now_ms
from moiety_platform.wake_on_request.models import WakeDemand, WakeLease, WakeSwitch, WakeTime
from moiety_platform.wake_on_request.plan import ModelDemand

LEASE_NAME = "engines"
FOLLOWED_MS = 10_000  # after which an engine has followed a command


class WakeKind(StrEnum):
    """Kinds of measured times: the end of sleep, or the start of an engine."""

    WAKE = "wake"
    START = "start"


async def put_demands(session: AsyncSession, owner: str, demands: Sequence[ModelDemand], ttl_ms: int) -> None:
    """Replace the waiting requests of a gateway process."""
    models = [demand.model for demand in demands]
    gone = WakeDemand.model.not_in(models) if models else WakeDemand.model.is_not(None)
    await session.execute(delete(WakeDemand).where(WakeDemand.owner == owner, gone))
    for demand in demands:
        fields = {
            "num_waiting": demand.num_waiting,
            "slo_ms": now_ms() + round(demand.slack_s * 1000),
            "since_ms": now_ms() - round(demand.waited_s * 1000),
            "expires_ms": now_ms() + ttl_ms,
        }
        insert = insert_into(session, WakeDemand).values(model=demand.model, owner=owner, **fields)
        await session.execute(insert.on_conflict_do_update(index_elements=["model", "owner"], set_=fields))


async def read_demands(session: AsyncSession) -> list[ModelDemand]:
    """Return the waiting requests of all gateways by model, and remove those of gateways that are gone."""
    await session.execute(delete(WakeDemand).where(WakeDemand.expires_ms <= now_ms()))
    rows = await session.execute(
        select(
            WakeDemand.model,
            func.sum(WakeDemand.num_waiting),
            func.min(WakeDemand.slo_ms) - now_ms(),
            now_ms() - func.min(WakeDemand.since_ms),
        )
        .group_by(WakeDemand.model)
        .order_by(WakeDemand.model)
    )
    return [
        ModelDemand(model, int(num_waiting), int(slack_ms) / 1000, max(0, int(waited_ms)) / 1000)
        for model, num_waiting, slack_ms, waited_ms in rows
    ]


async def claim_lease(session: AsyncSession, owner: str, lease_ms: int) -> bool:
    """Take or extend the lease; return False if another gateway process holds it."""
    mine = {"owner": owner, "expires_ms": now_ms() + lease_ms}
    insert = insert_into(session, WakeLease).values(name=LEASE_NAME, **mine)
    free = or_(WakeLease.expires_ms <= now_ms(), WakeLease.owner == owner)
    taken = insert.on_conflict_do_update(index_elements=["name"], set_=mine, where=free)
    return await session.scalar(taken.returning(WakeLease.name)) is not None


async def release_lease(session: AsyncSession, owner: str) -> None:
    """Give the lease back, so that another gateway process can decide at once."""
    await session.execute(delete(WakeLease).where(WakeLease.owner == owner))


async def put_switches(session: AsyncSession, switches: Mapping[str, str]) -> None:
    """Record engines, by address, that are put to sleep for another model."""
    for address, model in switches.items():
        fields = {"model": model, "at_ms": now_ms()}
        insert = insert_into(session, WakeSwitch).values(address=address, **fields)
        await session.execute(insert.on_conflict_do_update(index_elements=["address"], set_=fields))


async def read_switches(session: AsyncSession) -> dict[str, str]:
    """Return the models for which engines gave way, by the engines' addresses."""
    return {one.address: one.model for one in await session.scalars(select(WakeSwitch))}


async def end_switches(session: AsyncSession, ended: Collection[str], awake: Collection[str]) -> None:
    """Remove the switches of the `ended` engines, and of `awake` ones that must have followed an earlier command."""
    is_over = and_(WakeSwitch.address.in_(awake), WakeSwitch.at_ms < now_ms() - FOLLOWED_MS)
    await session.execute(delete(WakeSwitch).where(or_(WakeSwitch.address.in_(ended), is_over)))


async def note_time(session: AsyncSession, model: str, kind: WakeKind, seconds: float) -> None:
    """Record a measured time; earlier ones count for a half."""
    wake_ms = round(seconds * 1000)
    insert = insert_into(session, WakeTime).values(model=model, kind=kind.value, wake_ms=wake_ms)
    mean = (WakeTime.wake_ms + wake_ms) // 2
    await session.execute(insert.on_conflict_do_update(index_elements=["model", "kind"], set_={"wake_ms": mean}))


async def read_times(session: AsyncSession) -> Mapping[WakeKind, dict[str, float]]:
    """Return the measured times in seconds, by kind and model."""
    found: dict[WakeKind, dict[str, float]] = {kind: {} for kind in WakeKind}
    for model, kind, wake_ms in await session.execute(select(WakeTime.model, WakeTime.kind, WakeTime.wake_ms)):
        found[WakeKind(kind)][model] = wake_ms / 1000
    return found
