"""Published spot prices in the store, within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, select
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
) -> SpotPriceRecord:
    """Return the price of the current interval; this one if no other gateway has published one meanwhile.

    Prices that ended long ago are deleted.
    """
    starts_ms = now_ms - now_ms % interval_ms
    row = {
        "model": model,
        "service_class": service_class,
        "starts_ms": starts_ms,
        "ends_ms": starts_ms + interval_ms,
        "percent": percent,
        "idle_percent": round(100 * idle),
    }
    await session.execute(insert_into(session, SpotPriceRecord).values(row).on_conflict_do_nothing())
    await session.execute(delete(SpotPriceRecord).where(SpotPriceRecord.ends_ms < now_ms - KEPT_MS))
    found = await find_price(session, model, service_class, now_ms)
    assert found is not None, "there is one now"
    return found


async def list_prices(session: AsyncSession, since_ms: int, until_ms: int, limit: int) -> Sequence[SpotPriceRecord]:
    """Return the newest published prices of a time span, the newest first."""
    wanted = (
        select(SpotPriceRecord)
        .where(SpotPriceRecord.ends_ms > since_ms, SpotPriceRecord.starts_ms < until_ms)
        .order_by(SpotPriceRecord.starts_ms.desc(), SpotPriceRecord.model, SpotPriceRecord.service_class)
        .limit(limit)
    )
    return (await session.scalars(wanted)).all()
