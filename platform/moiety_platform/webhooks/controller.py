"""`/admin/v1/webhooks`: destinations of alerts. The admin router authenticates."""

from __future__ import annotations

from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, JSONBody, SkipValidation

from moiety_platform.access.table import AdminAction, needs
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.openapi.described import fails
from moiety_platform.webhooks import service
from moiety_platform.webhooks.addresses import AddressPolicy
from moiety_platform.webhooks.events import derive_secret
from moiety_platform.webhooks.schemas import MadeWebhook, NewWebhook, WebhookView, WebhookViews


def webhook_routes(reach: AddressPolicy, pepper: bytes) -> list[HTTPRouteHandler]:
    """Return the handlers, for the admin router to register."""

    @post("/webhooks", tags=["webhooks"], name="create_webhook", opt=needs(AdminAction.WRITE_WEBHOOKS) | fails(409))
    async def create_webhook(
        store: NamedDependency[AuditedStore],
        clock: NamedDependency[SkipValidation[Clock]],
        data: JSONBody[NewWebhook],
    ) -> MadeWebhook:
        """Send alerts to this address from now on. Only this response contains the signing secret."""
        async with store.write() as session:
            view = await service.create_webhook(session, data, reach, clock.now())
        return MadeWebhook(view, derive_secret(view.id, pepper))

    @get("/webhooks", tags=["webhooks"], name="list_webhooks", opt=needs(AdminAction.READ_WEBHOOKS))
    async def list_webhooks(database: NamedDependency[Database]) -> WebhookViews:
        """List all webhooks, oldest first, and their state."""
        async with database.read() as session:
            return WebhookViews(await service.list_webhooks(session))

    @delete(
        "/webhooks/{webhook_id:str}",
        status_code=200,
        tags=["webhooks"],
        name="delete_webhook",
        opt=needs(AdminAction.WRITE_WEBHOOKS),
    )
    async def delete_webhook(store: NamedDependency[AuditedStore], webhook_id: FromPath[str]) -> WebhookView:
        """Delete a webhook; returns its last state."""
        async with store.write() as session:
            return await service.delete_webhook(session, webhook_id)

    return [create_webhook, list_webhooks, delete_webhook]
