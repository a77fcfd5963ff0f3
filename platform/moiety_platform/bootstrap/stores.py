"""Opens the stores of a gateway, and what keeps its rows: usage, quotas, idempotency keys and retention."""

from __future__ import annotations

from contextlib import AsyncExitStack

from moiety_platform.bootstrap.overrides import Overrides
from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.db.session import CHECKING, REPORTING, SERVING, Database
from moiety_platform.files.store import Now
from moiety_platform.idempotency.key_store_client import IdempotencyKeys
from moiety_platform.idempotency.limits import AnswerStorageLimits
from moiety_platform.idempotency.store import KeyStore
from moiety_platform.inference.request_recorder import UsageSink
from moiety_platform.live_settings import LiveSettings
from moiety_platform.metrics import Metrics
from moiety_platform.object_storage.readiness import ObjectStoreReadiness
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.quota.enforcer import LEASE_S, QuotaEnforcer
from moiety_platform.quota.store import LeaseStore
from moiety_platform.retention.jobs import retention_jobs_of
from moiety_platform.retention.metrics import RetentionMetrics
from moiety_platform.retention.service import RetentionService
from moiety_platform.settings import GatewaySettings
from moiety_platform.usage.metering import MeterReader
from moiety_platform.usage.recorder import UsageRecorder

RETENTION_SETTINGS = (
    "retention_interval_s", "keep_files_days", "keep_batches_days", "keep_requests_days", "keep_limit_windows_days",
    "usage_export_format", "usage_export_days",
)  # fmt: skip


def open_stores(
    stack: AsyncExitStack, settings: GatewaySettings, opened: Database | None
) -> tuple[Database, Database, Database, Database | None]:
    """Open the databases, which the stack closes; an `opened` store serves all uses and stays open.

    Return the store for requests, the same store for read-only use and for look-ups of keys, and the trace store, if it
    is another one.
    """
    if opened is not None:
        return opened, opened, opened, None
    url = settings.store_url
    database, report_database, keys = (Database.open(url, pool=pool) for pool in (SERVING, REPORTING, CHECKING))
    traces = Database.open(settings.traces_url, pool=REPORTING) if settings.traces_url != url else None
    for store in (database, report_database, keys, traces):
        if store is not None:
            stack.push_async_callback(store.close)
    return database, report_database, keys, traces


def open_objects(
    stack: AsyncExitStack, settings: GatewaySettings, database: Database
) -> tuple[StoreReadiness, ObjectStore, ObjectStoreReadiness]:
    """Open the object store and the checks of both stores, which the stack closes. Raises Unavailable."""
    objects = ObjectStore.open(settings.objects_url)
    stack.push_async_callback(objects.close)
    store, objects_ready = (
        StoreReadiness(database),
        ObjectStoreReadiness(database, objects, is_own=settings.has_embedded_stores),
    )
    stack.push_async_callback(store.close)
    stack.push_async_callback(objects_ready.close)
    return store, objects, objects_ready


async def start_accounting(
    stack: AsyncExitStack, settings: GatewaySettings, process_id: str, database: Database, overrides: Overrides
) -> tuple[UsageSink, UsageRecorder, QuotaEnforcer]:
    """Start the recorder of usage and the enforcer of quotas, until the stack is closed.

    Return the sink of usage rows, the recorder, which is the sink unless it is overridden, and the enforcer.
    """
    stored_usage = UsageRecorder(database, settings.usage_journal_dir)
    await stored_usage.start()
    stack.push_async_callback(stored_usage.stop)
    quotas = QuotaEnforcer(database, LeaseStore(process_id, LEASE_S), overrides.clock, ttl_s=LEASE_S)
    await quotas.start()
    stack.push_async_callback(quotas.stop)
    return stored_usage if overrides.usage is None else overrides.usage, stored_usage, quotas


async def start_idempotency(
    stack: AsyncExitStack, settings: GatewaySettings, database: Database, overrides: Overrides
) -> IdempotencyKeys:
    """Start the store of idempotency keys, until the stack is closed."""
    keys = IdempotencyKeys(database, KeyStore(now=overrides.now), AnswerStorageLimits.of(settings))
    await keys.start()
    stack.push_async_callback(keys.stop)
    return keys


async def start_meter(stack: AsyncExitStack, database: Database, stored_usage: UsageRecorder) -> MeterReader:
    """Start the reader of metered tokens, until the stack is closed."""
    meter = MeterReader(database, stored_usage.holds)
    await meter.start()
    stack.push_async_callback(meter.stop)
    return meter


async def start_retention(
    stack: AsyncExitStack,
    live: LiveSettings[GatewaySettings],
    settings: GatewaySettings,
    process_id: str,
    database: Database,
    objects: ObjectStore,
    metrics: Metrics,
    now: Now,
) -> RetentionService:
    """Start the deletion of expired rows, which follows the settings, until the stack is closed."""
    jobs = retention_jobs_of(settings, database, objects, now)
    interval_s = settings.retention_interval_s
    retention_metrics = RetentionMetrics(metrics.registry)
    retention = RetentionService(process_id, database, jobs, retention_metrics, interval_s=interval_s, now=now)
    live.follow(
        RETENTION_SETTINGS,
        lambda settings: retention.use(
            retention_jobs_of(settings, database, objects, now), settings.retention_interval_s
        ),
    )
    await retention.start()
    stack.push_async_callback(retention.stop)
    return retention
