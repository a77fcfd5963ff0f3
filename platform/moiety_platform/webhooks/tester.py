"""Test deliveries: one signed request to a webhook at once, and the receiver's response for the administrator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from moiety_platform.clock import Clock
from moiety_platform.tenants.checks import new_id
from moiety_platform.webhooks.addresses import CannotReach
from moiety_platform.webhooks.events import event_of_test
from moiety_platform.webhooks.formats import body_of
from moiety_platform.webhooks.models import Webhook
from moiety_platform.webhooks.schemas import DeliveryReport
from moiety_platform.webhooks.signing import signed_headers
from moiety_platform.webhooks.terms import WebhookFormat
from moiety_platform.webhooks.webhook_client import WebhookClient, WebhookResponse

MAX_EXCERPT_BYTES = 500


@dataclass(frozen=True, eq=False, slots=True)
class WebhookTester:
    """Sender of test deliveries. They are not queued, not repeated, and do not change the webhook's state."""

    poster: WebhookClient
    peppers: Sequence[bytes]
    clock: Clock

    async def send(self, webhook: Webhook) -> DeliveryReport:
        """Send a test event; at PagerDuty, the incident that it opens is resolved at once."""
        form, event_id, began_s = WebhookFormat(webhook.format), new_id("evt"), monotonic()
        status, error, excerpt = None, None, ""
        for is_resolved in (False, True) if form is WebhookFormat.PAGERDUTY else (False,):
            event = event_of_test(event_id, self.clock.now(), is_resolved=is_resolved)
            try:
                response = await self._post(webhook, body_of(event, form, webhook.routing_key))
            except CannotReach as exc:
                status, error = None, exc.code
                break
            status, excerpt = response.status, response.excerpt
            if not response.is_success:
                error = f"status_{response.status}"
                break
        duration_ms = round((monotonic() - began_s) * 1000, 1)
        return DeliveryReport(event_id, error is None, status, error, duration_ms, excerpt)

    async def _post(self, webhook: Webhook, body: bytes) -> WebhookResponse:
        headers = signed_headers(webhook.id, self.peppers, body, self.clock.now())
        plain = {**headers, "Accept-Encoding": "identity"}
        return await self.poster.send(webhook.url, body, plain, max_excerpt_bytes=MAX_EXCERPT_BYTES)
