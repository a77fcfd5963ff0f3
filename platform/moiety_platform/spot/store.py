"""Published spot prices in the store, within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.dialect import insert_into
from moiety_platform.spot.models import SpotPriceRecord

KEPT_MS = 30 * 86_400_000


async def find_price(session: AsyncSession, model: str, service_class: str, now_ms: int) -> SpotPriceRecord | None:
    """Return the price that is valid now, None if no gateway has published one."""
    return await session.scalar(
        select(SpotPriceRecord)
        .where(
            SpotPriceRecord.model == model,
            SpotPriceRecord.service_class == service_class,
            SpotPriceRecord.starts_ms <= now_ms,
            SpotPriceRecord.ends_ms > now_ms,
        )
        .order_by(SpotPriceRecord.starts_ms)
        .limit(1)
    )


async def publish_price(
    session: AsyncSession, model: str, service_class: str, now_ms: int, interval_ms: int, percent: int, idle: float
) -> SpotPriceRecord | None:
    """Return the price of the current interval; this one if no other gateway has published one meanwhile.

    The interval ends at the next multiple of its length. It starts where the last price ended, if that was within the
    interval: the length of intervals may have changed since. None if another gateway deleted the price. Prices that
    ended long ago are deleted.
    """
    aligned_ms = now_ms - now_ms % interval_ms
    ended_ms = await session.scalar(
        select(func.max(SpotPriceRecord.ends_ms)).where(
            SpotPriceRecord.model == model,
            SpotPriceRecord.service_class == service_class,
            SpotPriceRecord.ends_ms <= now_ms,
        )
    )
    starts_ms = aligned_ms if ended_ms is None else max(aligned_ms, ended_ms)
    row = {
        "model": model,
        "service_class": service_class,
        "starts_ms": starts_ms,
        "ends_ms": aligned_ms + interval_ms,
        "percent": percent,
        "idle_percent": round(100 * idle),
    }
    await session.execute(insert_into(session, SpotPriceRecord).values(row).on_conflict_do_nothing())
    await session.execute(delete(SpotPriceRecord).where(SpotPriceRecord.ends_ms < now_ms - KEPT_MS))
    return await find_price(session, model, service_class, now_ms)


async def list_prices(session: AsyncSession, since_ms: int, until_ms: int, limit: int) -> Sequence[SpotPriceRecord]:
    """Return the newest published prices of a time span, the newest first."""
    wanted = (
        select(SpotPriceRecord)
        .where(SpotPriceRecord.ends_ms > since_ms, SpotPriceRecord.starts_ms < until_ms)
        .order_by(SpotPriceRecord.starts_ms.desc(), SpotPriceRecord.model, SpotPriceRecord.service_class)
        .limit(limit)
    )
    return (await session.scalars(wanted)).all()
