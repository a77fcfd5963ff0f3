"""Operations on limits: set, find, list and delete, within the caller's transaction. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, delete, false, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.audit.trail import Change, note, row_of
from moiety_platform.db.bulk import in_rows
from moiety_platform.db.dialect import insert_into
from moiety_platform.db.now import now_ms
from moiety_platform.db.paging import PageRequest, read_page
from moiety_platform.errors import BadRequest, NotFound
from moiety_platform.quota.admin_resource import QUOTAS
from moiety_platform.quota.kinds import MAX_CAP, MAX_RATE, LimitKind, LimitLevel, Meter, Scope, window_start
from moiety_platform.quota.models import Quota, QuotaAlert, QuotaRate, QuotaThreshold, QuotaWindow
from moiety_platform.quota.owners import own_quota
from moiety_platform.quota.schemas import MAX_THRESHOLDS, NewQuota, QuotaPage, QuotaView, rate_view, window_view
from moiety_platform.tenants.checks import is_id, new_id
from moiety_platform.tenants.models import ApiKey, Project, Tenant
from moiety_platform.tenants.rows import require_row

_TABLES: dict[LimitLevel, type[Tenant | Project | ApiKey]] = {
    LimitLevel.TENANT: Tenant,
    LimitLevel.PROJECT: Project,
    LimitLevel.KEY: ApiKey,
}


async def set_quota(session: AsyncSession, new: NewQuota, now: datetime) -> QuotaView:
    """Set a limit, or change its cap; gateways apply it within seconds.

    A cap below the amount already used rejects all requests until the window ends. Raises BadRequest, or NotFound if
    the scope is unknown.
    """
    scope_id = await _scope_id(session, new)
    alert_at = _check_thresholds(new)
    same = (Quota.level, Quota.scope_id, Quota.kind)
    values = {"level": new.level, "scope_id": scope_id, "kind": new.kind, "cap": new.cap}
    old_cap = await session.scalar(select(Quota.cap).where(*_same(new, scope_id)))
    statement = insert_into(session, Quota).values(id=new_id("quo"), created_at=now, **values)
    statement = statement.on_conflict_do_update(index_elements=same, set_={"cap": new.cap}).returning(Quota)
    quota = (await session.scalars(statement, execution_options={"populate_existing": True})).one()
    old_thresholds = (await _thresholds(session, [quota.id])).get(quota.id, ())
    if alert_at is not None and alert_at != old_thresholds:
        await _set_thresholds(session, quota.id, alert_at)
    after = {**row_of(quota), "alert_at": list(old_thresholds if alert_at is None else alert_at)}
    before = None if old_cap is None else {**after, "cap": old_cap, "alert_at": list(old_thresholds)}
    note(session, Change("create" if before is None else "change", Quota.__tablename__, quota.id, before, after))
    return (await _views(session, [quota], now))[0]


async def find_quota(session: AsyncSession, new: NewQuota, now: datetime) -> QuotaView | None:
    """Return the limit that `new` would replace; None if there is none. Raises the same errors as `set_quota`."""
    scope_id = await _scope_id(session, new)
    quota = (await session.scalars(select(Quota).where(*_same(new, scope_id)))).one_or_none()
    return None if quota is None else (await _views(session, [quota], now))[0]


async def get_quota(session: AsyncSession, quota_id: str, now: datetime) -> QuotaView:
    """Return one limit. Raises NotFound."""
    return (await _views(session, [await _find(session, quota_id)], now))[0]


async def list_quotas(
    session: AsyncSession, page: PageRequest, now: datetime, *, scope_id: str | None, tenant_id: str | None
) -> QuotaPage:
    """Return a page of limits, oldest first.

    `scope_id` selects those of one tenant, project or key; `tenant_id` those of one tenant and of its projects and
    keys.
    """
    statement = select(Quota)
    if tenant_id is not None:
        statement = statement.where(own_quota(tenant_id) if is_id(tenant_id) else false())
    if scope_id is not None:
        key = await session.get(ApiKey, scope_id) if is_id(scope_id) else None
        statement = statement.where(Quota.scope_id == ((key and key.root_id) or scope_id))
    quotas, next_cursor = await read_page(session, statement, page, Quota.created_at, Quota.id)
    return QuotaPage(await _views(session, quotas, now), next_cursor)


async def delete_quota(session: AsyncSession, quota_id: str, now: datetime) -> QuotaView:
    """Delete a limit; return its last state. Raises NotFound."""
    quota = await _find(session, quota_id)
    view = (await _views(session, [quota], now))[0]
    await _set_thresholds(session, quota.id, ())
    await session.delete(quota)
    return view


async def _find(session: AsyncSession, quota_id: str) -> Quota:
    return await require_row(session, Quota, quota_id, QUOTAS)


async def _scope_id(session: AsyncSession, new: NewQuota) -> str:
    """Check the cap, and return the scope id that the limit is stored under."""
    highest = MAX_CAP if new.kind.meter is Meter.STOCK else MAX_RATE
    if not 0 <= new.cap <= highest:
        raise BadRequest(f"'cap' must be a number from 0 to {highest}; 0 rejects every request.", param="cap")
    return await _require(session, Scope(new.level, new.scope_id))


def _same(new: NewQuota, scope_id: str) -> tuple[ColumnElement[bool], ...]:
    return Quota.level == new.level, Quota.scope_id == scope_id, Quota.kind == new.kind


async def _require(session: AsyncSession, scope: Scope) -> str:
    """Return the id that limits of the scope are stored under; for a key, its root id. Raises NotFound."""
    table = _TABLES[scope.level]
    found: Tenant | Project | ApiKey | None = await session.get(table, scope.id) if is_id(scope.id) else None
    if found is None:
        raise NotFound(f"There is no {scope.level} with the id {scope.id[:64]!r}.", param="scope_id")
    return (found.root_id or found.id) if isinstance(found, ApiKey) else found.id


def _check_thresholds(new: NewQuota) -> tuple[int, ...] | None:
    """Return the percents in order; None if they are to stay unchanged. Raises BadRequest."""
    if isinstance(new.alert_at, msgspec.UnsetType):
        return None
    if new.alert_at and new.kind.meter is not Meter.STOCK:
        raise BadRequest(
            f"A limit of {new.kind} has no window that is used up, so there is nothing to alert at; leave 'alert_at' "
            "out, or set it on a limit per day or month.",
            code="no_alerts_on_this_kind",
            param="alert_at",
        )
    if len(new.alert_at) > MAX_THRESHOLDS or not all(1 <= percent <= 100 for percent in new.alert_at):
        raise BadRequest(
            f"'alert_at' must be at most {MAX_THRESHOLDS} percents of the cap, each from 1 to 100.", param="alert_at"
        )
    return tuple(sorted(set(new.alert_at)))


async def _set_thresholds(session: AsyncSession, quota_id: str, percents: Sequence[int]) -> None:
    await session.execute(delete(QuotaThreshold).where(QuotaThreshold.quota_id == quota_id))
    if percents:
        rows = [{"quota_id": quota_id, "percent": percent} for percent in percents]
        await session.execute(insert_into(session, QuotaThreshold).on_conflict_do_nothing(), rows)


async def _thresholds(session: AsyncSession, quota_ids: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the percents of each limit that has any, in order."""
    columns = QuotaThreshold.quota_id, QuotaThreshold.percent
    wanted = select(*columns).where(QuotaThreshold.quota_id.in_(quota_ids)).order_by(*columns)
    return _grouped(await session.execute(wanted))


def _grouped(rows: Iterable[Any]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for quota_id, percent in rows:
        found[quota_id] = (*found.get(quota_id, ()), percent)
    return found


async def _views(session: AsyncSession, quotas: Sequence[Quota], now: datetime) -> list[QuotaView]:
    starts = {quota.id: window_start(LimitKind(quota.kind).period, now) for quota in quotas}
    wanted = in_rows(session, (QuotaWindow.quota_id, QuotaWindow.start), starts.items())
    windows = {window.quota_id: window for window in await session.scalars(select(QuotaWindow).where(wanted))}
    of_rates = select(QuotaRate, now_ms()).where(QuotaRate.quota_id.in_(list(starts)))
    rates = {rate.quota_id: (rate, moment) for rate, moment in await session.execute(of_rates)}
    thresholds = await _thresholds(session, list(starts))
    columns = QuotaAlert.quota_id, QuotaAlert.percent
    sent = in_rows(session, (QuotaAlert.quota_id, QuotaAlert.start), starts.items())
    alerted = _grouped(await session.execute(select(*columns).where(sent).order_by(*columns)))
    views = [
        rate_view(quota, *rates[quota.id]) if quota.id in rates else window_view(quota, windows.get(quota.id), now)
        for quota in quotas
    ]
    return [
        msgspec.structs.replace(view, alert_at=thresholds.get(view.id, ()), alerted=alerted.get(view.id, ()))
        for view in views
    ]
