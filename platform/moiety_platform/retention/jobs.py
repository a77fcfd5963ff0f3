"""The retention jobs: deletion of expired rows and of objects, daily sums and exports of usage, and moves of objects.

`docs/administration.md` contains the same list. Tables that are not listed are kept: the ledger, the hourly sums and
the audit log; and the single requests, unless a setting limits their age.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.adapters.contents import AdapterContents
from moiety_platform.agent_runs.store import KEPT as RUNS_KEPT
from moiety_platform.agent_runs.store import purge_runs
from moiety_platform.batches.purge import purge_batches
from moiety_platform.batches.results import BatchFiles
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.files.contents import FileContents
from moiety_platform.files.store import read_clock, set_expiry
from moiety_platform.idempotency.store import KeyStore
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.quota.purge import purge_abandoned_rates, purge_windows
from moiety_platform.request_contents.service import purge_contents
from moiety_platform.responses_api.conversation_store import ConversationStore
from moiety_platform.responses_api.store import ResponseStore
from moiety_platform.retention.leases import Now
from moiety_platform.retention.orphans import OrphanedObjects
from moiety_platform.retention.service import ObjectJob, RetentionJob
from moiety_platform.settings import GatewaySettings
from moiety_platform.simulations import store as simulations
from moiety_platform.usage.attributed_sums import sum_up_attributed
from moiety_platform.usage.days import sum_up_some
from moiety_platform.usage.minutes import KEPT_HOURS, purge_minutes
from moiety_platform.usage.purge import purge_requests
from moiety_platform.usage_exports.files import ExportFormat
from moiety_platform.usage_exports.service import UsageExports
from moiety_platform.webhooks.deliveries import forget_alerts, forget_old, forget_operational_alerts

DAY_MS = 24 * 3600 * 1000
ALERTS_KEPT = timedelta(days=90)
EXPORT_INTERVAL_S = 600.0  # between looks for days to export


def retention_jobs_of(
    settings: GatewaySettings, database: Database, objects: ObjectStore, now: Now = now_ms
) -> list[RetentionJob | ObjectJob]:
    """Return the jobs of one gateway process, in this order: rows that other rows refer to are deleted first."""

    async def purge_old_windows(session: AsyncSession) -> int:
        before = await _ago(session, timedelta(days=settings.keep_limit_windows_days), now)
        return await forget_alerts(session, before) or await purge_windows(session, before)

    async def purge_old_requests(session: AsyncSession) -> int:
        return await purge_requests(session, await _ago(session, timedelta(days=settings.keep_requests_days), now))

    async def purge_old_minutes(session: AsyncSession) -> int:
        return await purge_minutes(session, await _ago(session, timedelta(hours=KEPT_HOURS), now))

    async def purge_old_alerts(session: AsyncSession) -> int:
        return await forget_operational_alerts(session, await _ago(session, ALERTS_KEPT, now))

    async def purge_old_runs(session: AsyncSession) -> int:
        return await purge_runs(session, await _ago(session, RUNS_KEPT, now))

    async def sum_up_days(session: AsyncSession) -> int:
        return await sum_up_some(session, await _ago(session, timedelta(), now))

    async def sum_up_end_users(session: AsyncSession) -> int:
        return await sum_up_attributed(session, await _ago(session, timedelta(), now))

    files = FileContents(database, objects, BatchFiles(database), now)
    adapters = AdapterContents(database, objects, now)
    jobs: list[RetentionJob | ObjectJob] = [
        RetentionJob("idempotent_requests", KeyStore(now=now).purge),
        RetentionJob("responses", ResponseStore(now).purge),
        RetentionJob("conversations", ConversationStore(now).purge),
        ObjectJob("files", files.purge),
        ObjectJob("file_contents", files.move_some),
        RetentionJob("batches", partial(purge_batches, keep_ms=settings.keep_batches_days * DAY_MS, now=now)),
        RetentionJob("webhook_deliveries", partial(forget_old, now=now)),
        RetentionJob("operational_alerts", purge_old_alerts),
        RetentionJob("request_contents", partial(purge_contents, now=now)),
        RetentionJob("usage_minutes", purge_old_minutes),
        RetentionJob("usage_days", sum_up_days),
        RetentionJob("usage_attributed_sums", sum_up_end_users),
        ObjectJob("adapters", adapters.purge),
        ObjectJob("adapter_contents", adapters.move_some),
        ObjectJob("orphaned_objects", OrphanedObjects(database, objects, now).delete, DAY_MS / 1000),
        RetentionJob("simulations", partial(simulations.purge, now=now)),
        RetentionJob("quota_windows", purge_old_windows),
        RetentionJob("forsaken_limits", purge_abandoned_rates),
        RetentionJob("agent_runs", purge_old_runs),
    ]
    if settings.keep_files_s is not None:
        jobs.insert(1, RetentionJob("files_without_end", partial(set_expiry, keep_s=settings.keep_files_s, now=now)))
    if settings.usage_export_format is not None:
        exports = UsageExports(
            database, objects, ExportFormat(settings.usage_export_format), settings.usage_export_days, now
        )
        jobs.append(ObjectJob("usage_exports", exports.export_next, EXPORT_INTERVAL_S))
    if settings.keep_requests_days:
        jobs.append(RetentionJob("usage", purge_old_requests))
    return jobs


async def _ago(session: AsyncSession, span: timedelta, now: Now) -> datetime:
    """Return the moment `span` ago, by the database's clock."""
    moment = datetime.fromtimestamp(await read_clock(session, now) / 1000, UTC)
    return moment - span
