"""Alerts for windows that have passed a threshold of their limit, each entered once. Within the caller's transaction.

Alerts are searched for periodically, in the sums that usage was booked into, so no request does work for them. A
threshold of 100 % counts as passed when 99.9 % of the cap is used, since the rest is rarely enough for another token.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Double, Select, and_, case, cast, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.dialect import insert_into
from moiety_platform.quota.kinds import LimitKind, LimitLevel, Period, window_start
from moiety_platform.quota.models import Quota, QuotaAlert, QuotaThreshold, QuotaWindow
from moiety_platform.tenants.checks import new_id
from moiety_platform.tenants.models import ApiKey, Project

ALERTS_AT_ONCE = 200
LATE_BOOKING = timedelta(hours=1)  # late bookings into a window are considered for this long after its end


async def any_alert_due(session: AsyncSession, now: datetime) -> bool:
    """Return whether a window has passed a threshold without an alert."""
    return (await session.execute(_alerts_due(now).limit(1))).first() is not None


async def tell(session: AsyncSession, now: datetime) -> list[QuotaAlert]:
    """Enter the missing alerts, and return those that were entered here.

    Gateways that do this at the same time enter each alert once.
    """
    found = (await session.execute(_alerts_due(now).limit(ALERTS_AT_ONCE))).all()
    if not found:
        return []
    rows = [{**row._mapping, "id": new_id("evt"), "at": now} for row in found]
    inserted = insert_into(session, QuotaAlert).on_conflict_do_nothing().returning(QuotaAlert)
    return list(await session.scalars(inserted, rows))


def _alerts_due(now: datetime) -> Select[str, datetime, int, str | None, str, str, str, int, int]:
    """Return a select of the missing alerts, without their id and time.

    It is in the order of the table, so that gateways do not deadlock.
    """
    told = and_(
        QuotaAlert.quota_id == QuotaWindow.quota_id,
        QuotaAlert.start == QuotaWindow.start,
        QuotaAlert.percent == QuotaThreshold.percent,
    )
    per_mille = case((QuotaThreshold.percent == 100, 999.0), else_=QuotaThreshold.percent * 10.0)
    passed = cast(QuotaWindow.settled, Double) * 1000.0 >= cast(Quota.cap, Double) * per_mille
    return (
        select(
            QuotaWindow.quota_id,
            QuotaWindow.start,
            QuotaThreshold.percent,
            _tenant().label("tenant_id"),
            Quota.level,
            Quota.scope_id,
            Quota.kind,
            Quota.cap,
            QuotaWindow.settled.label("used"),
        )
        .join(QuotaThreshold, QuotaThreshold.quota_id == QuotaWindow.quota_id)
        .join(Quota, Quota.id == QuotaWindow.quota_id)
        .outerjoin(QuotaAlert, told)
        .where(QuotaAlert.id.is_(None), QuotaWindow.settled > 0, passed, _of_now(now))
        .order_by(QuotaWindow.quota_id, QuotaWindow.start, QuotaThreshold.percent)
    )


def _of_now(now: datetime) -> ColumnElement[bool]:
    """Return a condition for the windows that are open, or have just ended."""
    moments = (now, now - LATE_BOOKING)
    return or_(*(and_(Quota.kind.in_(_kinds(p)), QuotaWindow.start.in_(_starts(p, moments))) for p in Period))


def _kinds(period: Period) -> list[LimitKind]:
    return [kind for kind in LimitKind if kind.period is period]


def _starts(period: Period, moments: Sequence[datetime]) -> list[datetime]:
    return sorted({window_start(period, moment) for moment in moments})


def _tenant() -> ColumnElement[str | None]:
    """Return an expression for the tenant that the limit belongs to."""
    of_project = select(Project.tenant_id).where(Project.id == Quota.scope_id).scalar_subquery()
    of_key = (
        select(func.coalesce(Project.tenant_id, ApiKey.tenant_id))
        .select_from(ApiKey)
        .outerjoin(Project, Project.id == ApiKey.project_id)
        .where(ApiKey.id == Quota.scope_id)
        .scalar_subquery()
    )
    return case(
        (Quota.level == LimitLevel.TENANT, Quota.scope_id),
        (Quota.level == LimitLevel.PROJECT, of_project),
        else_=of_key,
    )
