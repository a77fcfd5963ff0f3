"""`/admin/v1/webhooks`: destinations of alerts. The admin router authenticates."""

from __future__ import annotations

from litestar import Controller, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.pepper import Pepper
from moiety_platform.db.session import Database
from moiety_platform.openapi.described import fails
from moiety_platform.webhooks import service
from moiety_platform.webhooks.addresses import AddressPolicy
from moiety_platform.webhooks.admin_resource import WEBHOOKS
from moiety_platform.webhooks.events import derive_secret
from moiety_platform.webhooks.schemas import CreatedWebhook, DeliveryReport, NewWebhook, WebhookView, WebhookViews
from moiety_platform.webhooks.tester import WebhookTester


class WebhookController(Controller):
    """Routes of webhooks. `reach` says which addresses they may have; `tester` sends test events."""

    path = WEBHOOKS.path
    tags = WEBHOOKS.tags

    @post(opt=needs(WEBHOOKS.write) | fails(409))
    async def create_webhook(
        self,
        store: NamedDependency[AuditedStore],
        pepper: NamedDependency[Pepper],
        reach: NamedDependency[SkipValidation[AddressPolicy]],
        data: JSONBody[NewWebhook],
    ) -> CreatedWebhook:
        """Send alerts to this address from now on. Only this response contains the signing secret."""
        async with store.write() as session:
            view = await service.create_webhook(session, data, reach, store.clock.now())
        return CreatedWebhook(view, derive_secret(view.id, pepper.value))

    @get(opt=needs(WEBHOOKS.read))
    async def list_webhooks(self, database: NamedDependency[Database]) -> WebhookViews:
        """List all webhooks, oldest first, and their state."""
        async with database.read() as session:
            return WebhookViews(await service.list_webhooks(session))

    @post("/{webhook_id:str}/test", status_code=200, opt=needs(WEBHOOKS.write) | fails(404))
    async def test_webhook(
        self,
        database: NamedDependency[Database],
        tester: NamedDependency[SkipValidation[WebhookTester]],
        webhook_id: FromPath[str],
    ) -> DeliveryReport:
        """Send a signed test event now, in the webhook's format, and return the receiver's response.

        It is sent once and not queued. At PagerDuty, the incident that it opens is resolved at once.
        """
        async with database.read() as session:
            webhook = await service.get_webhook(session, webhook_id)
        return await tester.send(webhook)

    @delete("/{webhook_id:str}", status_code=200, opt=needs(WEBHOOKS.write))
    async def delete_webhook(self, store: NamedDependency[AuditedStore], webhook_id: FromPath[str]) -> WebhookView:
        """Delete a webhook; returns its last state."""
        async with store.write() as session:
            return await service.delete_webhook(session, webhook_id)
