"""Creates, lists and deletes webhooks within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.errors import BadRequest, Conflict, NotFound
from moiety_platform.tenants.checks import is_id, new_id
from moiety_platform.webhooks.addresses import AddressPolicy
from moiety_platform.webhooks.models import DeliveryState, Webhook, WebhookDelivery
from moiety_platform.webhooks.schemas import ROUTING_KEY, NewWebhook, WebhookView
from moiety_platform.webhooks.terms import EventGroup, WebhookFormat

MAX_WEBHOOKS = 20


async def create_webhook(session: AsyncSession, new: NewWebhook, reach: AddressPolicy, now: datetime) -> WebhookView:
    """Create a webhook, which gets the events from now on. Raises BadRequest, or Conflict where there are too many."""
    url, events = reach.check(new.url), _parse_groups(new.events)
    _check_format(new)
    if (await session.scalar(select(func.count()).select_from(Webhook)) or 0) >= MAX_WEBHOOKS:
        raise Conflict(f"The limit of {MAX_WEBHOOKS} webhooks is reached; delete one first.", code="too_many_webhooks")
    webhook = Webhook(
        id=new_id("whk"), url=url, created_at=now, format=new.format, routing_key=new.routing_key, events=events
    )
    session.add(webhook)
    await session.flush()
    return WebhookView.of(webhook, 0, 0)


def _check_format(new: NewWebhook) -> None:
    """Check the format and its routing key. Raises BadRequest."""
    if new.format not in frozenset(WebhookFormat):
        known = ", ".join(WebhookFormat)
        raise BadRequest(f"'format' must be one of {known}, not {new.format[:64]!r}.", param="format")
    needs_key = new.format == WebhookFormat.PAGERDUTY
    if needs_key and (new.routing_key is None or not ROUTING_KEY.fullmatch(new.routing_key)):
        raise BadRequest(
            "the format 'pagerduty' needs 'routing_key': the integration key of an Events API v2 integration, 16 to 64 "
            "letters and digits.",
            param="routing_key",
        )
    if not needs_key and new.routing_key is not None:
        raise BadRequest(
            f"'routing_key' is for the format 'pagerduty'; leave it out for {new.format!r}.", param="routing_key"
        )


def _parse_groups(names: list[str] | None) -> str | None:
    """Return the stored form of groups of events, in their order. Raises BadRequest."""
    if names is None:
        return None
    known = [group.value for group in EventGroup]
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise BadRequest(
            f"'events' must be some of {', '.join(known)}, each once; leave it out for all.", param="events"
        )
    return ",".join(sorted(names, key=known.index))


async def get_webhook(session: AsyncSession, webhook_id: str) -> Webhook:
    """Return a webhook. Raises NotFound."""
    webhook = await session.get(Webhook, webhook_id) if is_id(webhook_id) else None
    if webhook is None:
        raise _not_found(webhook_id)
    return webhook


async def list_webhooks(session: AsyncSession) -> list[WebhookView]:
    """Return all webhooks, oldest first."""
    states = WebhookDelivery.webhook_id, WebhookDelivery.state
    counted = select(*states, func.count()).group_by(*states)
    counts = {(webhook_id, state): number for webhook_id, state, number in await session.execute(counted)}
    webhooks = await session.scalars(select(Webhook).order_by(Webhook.created_at, Webhook.id))
    return [
        WebhookView.of(one, *(counts.get((one.id, state), 0) for state in (DeliveryState.PENDING, DeliveryState.DEAD)))
        for one in webhooks
    ]


async def delete_webhook(session: AsyncSession, webhook_id: str) -> WebhookView:
    """Delete a webhook with its pending events; return its last state. Raises NotFound."""
    found = {view.id: view for view in await list_webhooks(session)} if is_id(webhook_id) else {}
    if webhook_id not in found:
        raise _not_found(webhook_id)
    await session.execute(delete(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook_id))
    await session.delete(await session.get_one(Webhook, webhook_id))
    return found[webhook_id]


def _not_found(webhook_id: str) -> NotFound:
    return NotFound(
        f"There is no webhook {webhook_id[:64]!r}; list the webhooks with GET /admin/v1/webhooks.",
        param="webhook_id",
    )
