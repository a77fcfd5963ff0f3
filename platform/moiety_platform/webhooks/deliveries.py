"""Queue of webhook events within the caller's transaction.

All gateways take from the same queue, under leases on the database's clock: an event of a killed gateway is sent again
by another, so delivery is at least once, except for a webhook that accepts nothing for hours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from moiety_platform.alerts.models import OperationalAlert
from moiety_platform.quota.models import QuotaAlert
from moiety_platform.tenants.models import Tenant
from moiety_platform.webhooks.events import event_of_condition, event_of_quota
from moiety_platform.webhooks.formats import body_of
from moiety_platform.webhooks.models import DeliveryState, Webhook, WebhookDelivery
from moiety_platform.webhooks.terms import EventGroup, WebhookFormat

MAX_PENDING = 1000  # pending events per webhook
MAX_TRIES = 12
AT_ONCE = 4  # per webhook and gateway
FORGET_ROWS = 500  # per transaction
KEPT_MS = 30 * 24 * 3600 * 1000  # retention of dead events
QUEUE_FULL = "queue_full"

Now = Callable[[], ColumnElement[int]]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event to send within its lease. `num_tries` counts this try."""

    webhook_id: str
    alert_id: str
    num_tries: int
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Sent:
    """Result of a delivery: `error` None is success. `wait_ms` is the wait before the next try; None: no more tries."""

    delivery: Delivery
    error: str | None = None
    wait_ms: int | None = None


async def enqueue(
    session: AsyncSession, alerts: Sequence[QuotaAlert | OperationalAlert], now: Now, group: EventGroup
) -> None:
    """Queue each alert once for each current webhook of its group. Events beyond a full queue are dead at once."""
    pending = func.count().filter(WebhookDelivery.state == DeliveryState.PENDING)
    waiting = select(WebhookDelivery.webhook_id, pending).group_by(WebhookDelivery.webhook_id)
    counts = dict((await session.execute(waiting)).all())
    moment = await session.scalar(select(now()))
    for webhook in (await session.scalars(select(Webhook).order_by(Webhook.id))).all():
        if group not in webhook.groups:
            continue
        webhook_id, num_pending = webhook.id, counts.get(webhook.id, 0)
        room = max(0, MAX_PENDING - num_pending)
        for number, alert in enumerate(alerts):
            state = DeliveryState.PENDING if number < room else DeliveryState.DEAD
            session.add(
                WebhookDelivery(webhook_id=webhook_id, alert_id=alert.id, state=state, num_tries=0, available_ms=moment)
            )
        if room < len(alerts):
            failed = {"failed_ms": moment, "last_error": QUEUE_FULL}
            await session.execute(update(Webhook).where(Webhook.id == webhook_id).values(failed))


async def any_due(session: AsyncSession, now: Now) -> bool:
    """Return whether an event is due now."""
    return (await session.execute(select(WebhookDelivery.alert_id).where(*_due(now)).limit(1))).first() is not None


async def claim(session: AsyncSession, lease_ms: int, now: Now) -> list[Delivery]:
    """Claim some due events: a few per webhook, so that a slow receiver does not delay the others.

    A claim counts as a try, so that an event that kills its sender is given up eventually.
    """
    found = []
    with_due = select(WebhookDelivery.webhook_id).where(*_due(now)).distinct()
    for webhook_id in (await session.scalars(with_due.order_by(WebhookDelivery.webhook_id))).all():
        statement = (
            select(WebhookDelivery, Webhook, QuotaAlert, Tenant.name, OperationalAlert)
            .join(Webhook, Webhook.id == WebhookDelivery.webhook_id)
            .outerjoin(QuotaAlert, QuotaAlert.id == WebhookDelivery.alert_id)
            .outerjoin(Tenant, Tenant.id == QuotaAlert.tenant_id)
            .outerjoin(OperationalAlert, OperationalAlert.id == WebhookDelivery.alert_id)
            .where(*_due(now), WebhookDelivery.webhook_id == webhook_id)
            .where(or_(QuotaAlert.id.is_not(None), OperationalAlert.id.is_not(None)))
            .order_by(WebhookDelivery.available_ms, WebhookDelivery.alert_id)
            .limit(AT_ONCE)
            .with_for_update(of=WebhookDelivery, skip_locked=True)
        )
        moment = await session.scalar(select(now())) or 0
        for row, webhook, quota_alert, tenant, alert in (await session.execute(statement)).all():
            row.num_tries += 1
            row.available_ms = moment + lease_ms
            event = event_of_condition(alert) if quota_alert is None else event_of_quota(quota_alert, tenant)
            body = body_of(event, WebhookFormat(webhook.format), webhook.routing_key)
            found.append(Delivery(webhook_id, row.alert_id, row.num_tries, webhook.url, body))
    return found


async def store(session: AsyncSession, results: Sequence[Sent], now: Now) -> None:
    """Store the results of deliveries.

    The failure of a delivery whose lease expired, and that another gateway has claimed since, is left to that gateway.
    """
    moment = await session.scalar(select(now())) or 0
    for sent in sorted(results, key=lambda one: (one.delivery.webhook_id, one.delivery.alert_id)):
        one = sent.delivery
        mine = WebhookDelivery.webhook_id == one.webhook_id, WebhookDelivery.alert_id == one.alert_id
        webhook = update(Webhook).where(Webhook.id == one.webhook_id)
        if sent.error is None:
            await session.execute(delete(WebhookDelivery).where(*mine))
            await session.execute(webhook.values(delivered_ms=moment))
            continue
        change = {"state": DeliveryState.DEAD} if sent.wait_ms is None else {"available_ms": moment + sent.wait_ms}
        still = WebhookDelivery.num_tries == one.num_tries
        await session.execute(update(WebhookDelivery).where(*mine, still).values(change))
        await session.execute(webhook.values(failed_ms=moment, last_error=sent.error))


async def forget_old(session: AsyncSession, *, now: Now) -> int:
    """Delete some long-dead events, and some of deleted webhooks; return their number."""
    old = and_(WebhookDelivery.state == DeliveryState.DEAD, WebhookDelivery.available_ms < now() - KEPT_MS)
    lost = WebhookDelivery.webhook_id.not_in(select(Webhook.id))
    key = WebhookDelivery.webhook_id, WebhookDelivery.alert_id
    wanted = select(*key).where(or_(old, lost)).limit(FORGET_ROWS).with_for_update(skip_locked=True)
    found = [tuple(row) for row in await session.execute(wanted)]
    if found:
        await session.execute(delete(WebhookDelivery).where(tuple_(*key).in_(found)))
    return len(found)


async def forget_operational_alerts(session: AsyncSession, before: datetime) -> int:
    """Delete some operational alerts from before `before`, except pending ones; return their number."""
    return await _forget_alerts(session, OperationalAlert, OperationalAlert.at, before)


async def forget_alerts(session: AsyncSession, before: datetime) -> int:
    """Delete some alerts of windows that began before `before`, except pending ones; return their number."""
    return await _forget_alerts(session, QuotaAlert, QuotaAlert.start, before)


async def _forget_alerts(
    session: AsyncSession,
    table: type[OperationalAlert | QuotaAlert],
    time_column: InstrumentedAttribute[datetime],
    before: datetime,
) -> int:
    waits = exists().where(WebhookDelivery.alert_id == table.id, WebhookDelivery.state == DeliveryState.PENDING)
    wanted = select(table.id).where(time_column < before, ~waits).order_by(time_column)
    found = await session.scalars(wanted.limit(FORGET_ROWS).with_for_update(of=table, skip_locked=True))
    ids = found.all()
    if ids:
        await session.execute(delete(table).where(table.id.in_(ids)))
    return len(ids)


def _due(now: Now) -> tuple[ColumnElement[bool], ...]:
    return WebhookDelivery.state == DeliveryState.PENDING, WebhookDelivery.available_ms <= now()
