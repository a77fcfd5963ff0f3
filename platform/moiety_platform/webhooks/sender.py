"""Sender of alerts: one background task of each gateway process.

Every few seconds one read transaction checks whether a window has passed an unreported threshold, and whether an event
is due; if neither, nothing else happens. When the database is down it waits and continues later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass

import structlog

from moiety_platform.backoff import Backoff
from moiety_platform.clock import Clock
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.quota.alerts import any_alert_due, tell
from moiety_platform.webhooks.addresses import CannotReach
from moiety_platform.webhooks.deliveries import (
    MAX_TRIES,
    Delivery,
    Now,
    Sent,
    any_due,
    claim,
    enqueue,
    store,
)
from moiety_platform.webhooks.signing import signed_headers
from moiety_platform.webhooks.terms import EventGroup
from moiety_platform.webhooks.webhook_client import TIMEOUT_S, WebhookClient

INTERVAL_S = 5.0
LEASE_S = 3 * TIMEOUT_S
BACKOFF = Backoff(first_s=5.0, max_s=3600.0)  # twelve tries take about two and a half hours

log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class AlertSender:
    """Periodic sender. Owned by the entry point; for one event loop. `stop` it before the poster is closed.

    `may_have_alerts` returns False if there is certainly nothing to send; without it, each round looks by itself.
    """

    database: Database
    poster: WebhookClient
    pepper: bytes
    clock: Clock
    _: KW_ONLY
    previous_pepper: bytes | None = None
    interval_s: float = INTERVAL_S
    backoff: Backoff = BACKOFF
    now: Now = now_ms
    may_have_alerts: Callable[[], Awaitable[bool]] | None = None

    def __post_init__(self) -> None:
        self._rounds = PeriodicTask("alert-sender", self.round, self.interval_s)

    async def start(self) -> None:
        self._rounds.start()

    async def stop(self) -> None:
        """Stop after the running deliveries. Idempotent."""
        await self._rounds.stop()

    async def round(self) -> bool:
        """Queue new alerts and send due events; return whether there may be more. Raises Unavailable."""
        if self.may_have_alerts is not None and not await self.may_have_alerts():
            return False
        num_done = 0
        async with self.database.read() as session:
            to_tell, to_send = await any_alert_due(session, self.clock.now()), await any_due(session, self.now)
        if to_tell:
            async with self.database.write() as session:
                alerts = await tell(session, self.clock.now())
                await enqueue(session, alerts, self.now, EventGroup.QUOTA)
            num_done += len(alerts)
            for alert in alerts:
                log.info("quota_threshold_passed", tenant_id=alert.tenant_id, kind=alert.kind, percent=alert.percent)
        if to_tell or to_send:
            num_done += await self._send()
        if num_done:
            self._rounds.wake()
        return num_done > 0

    async def _send(self) -> int:
        """Send the claimed events; return the number of tries."""
        async with self.database.write() as session:
            deliveries = await claim(session, round(LEASE_S * 1000), self.now)
        results = await asyncio.gather(*(self._deliver(delivery) for delivery in deliveries))
        if results:
            async with self.database.write() as session:
                await store(session, results, self.now)
        return len(results)

    async def _deliver(self, delivery: Delivery) -> Sent:
        peppers = [self.pepper] if self.previous_pepper is None else [self.pepper, self.previous_pepper]
        headers = signed_headers(delivery.webhook_id, peppers, delivery.body, self.clock.now())
        try:
            await self.poster.post(delivery.url, delivery.body, headers)
        except CannotReach as error:
            is_last = delivery.num_tries >= MAX_TRIES
            wait_ms = None if is_last else round(self.backoff.after(delivery.num_tries - 1) * 1000)
            log.warning(
                "webhook_failed",
                webhook_id=delivery.webhook_id,
                event_id=delivery.alert_id,
                error=error.code,
                num_tries=delivery.num_tries,
                given_up=is_last,
                advice="check the receiver of the webhook",
            )
            return Sent(delivery, error.code, wait_ms)
        return Sent(delivery)
