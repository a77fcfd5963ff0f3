"""Creates, lists and deletes webhooks within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.errors import Conflict, NotFound
from moiety_platform.tenants.checks import is_id, new_id
from moiety_platform.webhooks.addresses import AddressPolicy
from moiety_platform.webhooks.models import DeliveryState, Webhook, WebhookDelivery
from moiety_platform.webhooks.schemas import NewWebhook, WebhookView

MAX_WEBHOOKS = 20


async def create_webhook(session: AsyncSession, new: NewWebhook, reach: AddressPolicy, now: datetime) -> WebhookView:
    """Create a webhook, which gets the events from now on. Raises BadRequest, or Conflict where there are too many."""
    url = reach.check(new.url)
    if (await session.scalar(select(func.count()).select_from(Webhook)) or 0) >= MAX_WEBHOOKS:
        raise Conflict(f"The limit of {MAX_WEBHOOKS} webhooks is reached; delete one first.", code="too_many_webhooks")
    webhook = Webhook(id=new_id("whk"), url=url, created_at=now)
    session.add(webhook)
    await session.flush()
    return WebhookView.of(webhook, 0, 0)


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
        raise NotFound(
            f"There is no webhook {webhook_id[:64]!r}; list the webhooks with GET /admin/v1/webhooks.",
            param="webhook_id",
        )
    await session.execute(delete(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook_id))
    await session.delete(await session.get_one(Webhook, webhook_id))
    return found[webhook_id]
