"""Checks of the database: reachability, revision, clock, pepper, owners' keys, prices, and usage records."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.access.roles import Role
from moiety_platform.cli.doctor.finding import Finding, Severity, fail, ok, warn
from moiety_platform.cli.doctor.peppers import check_pepper
from moiety_platform.clock import Clock
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.db.url import redact, sqlite_path
from moiety_platform.prices.models import PriceRecord
from moiety_platform.quota.kinds import LimitKind, Unit
from moiety_platform.quota.models import Quota
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenants.models import ApiKey
from moiety_platform.usage.models import UsageHour
from moiety_platform.usage.quarantined_rows import QuarantinedUsage
from moiety_platform.usage.reconciliation import reconcile, take_snapshot_locks

AREA = "store"
MAX_SKEW_S = 2.0
DRIFT_HOURS = 48  # includes a whole day, whose sums can be compared
MIGRATE_TIMEOUT_S = 30


async def check_store(settings: GatewaySettings, admin_key: str | None, clock: Clock) -> AsyncIterator[Finding]:
    """Run the checks of the store; those that need the tables only run if the revision is right."""
    file = sqlite_path(settings.store_url)
    if file is not None and not file.parent.exists():
        advice = "name the server's data directory with --data-dir; if there is no server yet, start moiety serve"
        yield fail(AREA, "data_dir_missing", f"there is no folder {file.parent} with a database", advice)
        return
    revision = check_revision(settings.store_url)
    yield revision
    for finding in check_journal(settings.usage_journal_dir):
        yield finding
    for finding in check_quarantined_usage(settings.usage_journal_dir):
        yield finding
    if revision.level is not Severity.OK:
        return
    database = Database.open(settings.store_url)
    try:
        async with database.read() as session:
            yield await check_clock(session, clock)
            yield await check_pepper(session, settings, admin_key, clock)
            yield await check_owners(session, clock)
            yield await check_prices(session, clock)
        async with database.read() as session:
            await take_snapshot_locks(session)
            async for finding in check_usage_ledger(session, clock):
                yield finding
    finally:
        await database.close()


def check_revision(url: str) -> Finding:
    """Check the revision with the migrations' own program, which this package does not import."""
    asked = [sys.executable, "-P", "-m", "moiety_migrations", "current", "--json"]
    environment = {**os.environ, "MOIETY_DATABASE_URL": url}  # not an argument, which every user can read
    done = subprocess.run(
        asked, env=environment, capture_output=True, text=True, timeout=MIGRATE_TIMEOUT_S, check=False
    )
    if not done.stdout:
        advice = "start the database, or correct MOIETY_DATABASE_URL (--database-url)"
        return fail(AREA, "database_away", done.stderr.strip().removeprefix("error: "), advice)
    told = json.loads(done.stdout)
    at, needed = told["revision"], told["head"]
    if at == needed:
        return ok(AREA, "revision", f"{told['database']} is at {at}")
    if at is not None and at > needed:
        advice = (
            "a newer release has migrated it: run that release here, or downgrade the database with its `moiety "
            "migrate downgrade`"
        )
        return fail(AREA, "database_newer", f"the database is at {at}, this release knows {needed}", advice)
    behind = f"the database is at {at or 'no revision'}, {needed} is needed"
    command = "moiety migrate upgrade"
    if redact(url) == url:
        command += f" --database-url {shlex.quote(url)}"
    return fail(AREA, "database_behind", behind, "migrate it before the gateways start", command)


async def check_clock(session: AsyncSession, clock: Clock) -> Finding:
    """Compare the clocks: leases and expiries use the database's clock, deadlines the machines'."""
    theirs = (await session.scalar(select(now_ms()))) or 0
    skew_s = clock.now().timestamp() - theirs / 1000
    message = f"this machine's clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the database's"
    if abs(skew_s) > MAX_SKEW_S:
        advice = "configure the same time servers on both machines (chrony, timesyncd), and step the wrong clock"
        return fail(AREA, "clock_skew", message, advice, "chronyc makestep")
    return ok(AREA, "clock", message)


async def check_owners(session: AsyncSession, clock: Clock) -> Finding:
    working = ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > clock.now())
    owners = (
        await session.scalar(select(func.count()).select_from(ApiKey).where(ApiKey.role == Role.OWNER, *working)) or 0
    )
    if not owners:
        advice = "start a gateway with --first-keys and a file that does not exist yet; in a cluster: "
        advice += "moiety cluster owner NAME --reissue"
        return fail(AREA, "no_owner", "no owner's key works", advice)
    return ok(AREA, "owners", f"working keys of owners: {owners}")


async def check_prices(session: AsyncSession, clock: Clock) -> Finding:
    """Check that used models have a price; without one, tenants with a limit in money are refused."""
    money = [kind for kind in LimitKind if kind.unit is Unit.MONEY]
    limits = await session.scalar(select(func.count()).select_from(Quota).where(Quota.kind.in_(money))) or 0
    if not limits:
        return ok(AREA, "prices", "no limit is in money")
    since = clock.now() - timedelta(hours=DRIFT_HOURS)
    used = select(UsageHour.model).where(UsageHour.hour >= since, UsageHour.output_tokens > 0).distinct()
    free = sorted(await session.scalars(used.where(UsageHour.model.not_in(select(PriceRecord.model)))))
    if free:
        message = f"{', '.join(free[:3])} has no price: requests under the {limits} limits in money are refused"
        advice = f"set one (dollars a million tokens): moiety price set {shlex.quote(free[0])} --input … --output …"
        return fail(AREA, "price_missing", message, advice)
    return ok(AREA, "prices", f"every model used in {DRIFT_HOURS} h has a price")


async def check_usage_ledger(session: AsyncSession, clock: Clock) -> AsyncIterator[Finding]:
    """Check that requests, ledger, sums and limits agree."""
    until = clock.now()
    report = await reconcile(session, until - timedelta(hours=DRIFT_HOURS), until)
    again = (
        "check again in a minute, because requests that end now may be stored in part; if the difference "
        "remains, create a support bundle"
    )
    if report.differences:
        tenants = ", ".join(one.tenant_id for one in report.differences[:3])
        message = f"requests, ledger and sums of {len(report.differences)} tenants differ: {tenants}"
        yield fail(AREA, "books_differ", message, again, "moiety usage reconcile")
    if report.days:
        tenants = ", ".join(one.tenant_id for one in report.days[:3])
        message = f"the sums of days of {len(report.days)} tenants differ from the sums of their hours: {tenants}"
        yield fail(AREA, "days_differ", message, again, "moiety usage reconcile")
    if report.windows:
        limits = ", ".join(sorted({one.quota_id for one in report.windows})[:3])
        message = f"{len(report.windows)} windows of limits differ from the sums of their leases: {limits}"
        yield fail(AREA, "limits_drift", message, again, "moiety usage reconcile")
    if report.quarantined:
        count = sum(one.leases for one in report.quarantined)
        message = f"{count} leases of gateways that died count as spent until engines prove otherwise"
        yield warn(
            AREA, "quarantined", message, "start the engines that they used; no limit is exceeded in the meantime"
        )
    if report.agrees:
        yield ok(AREA, "books", f"requests, ledger, sums and limits of {DRIFT_HOURS} h agree")


def check_journal(folder: Path) -> Iterator[Finding]:
    """Find journals of usage that no running gateway will store."""
    left = [path.name for path in sorted(folder.glob("*.jsonl")) if path.stat().st_size and not _is_held(path)]
    if left:
        message = f"usage of a gateway that was killed is in {folder}: {', '.join(left)}"
        advice = "start a gateway on this data directory: it stores them first"
        yield fail(AREA, "usage_left", message, advice)


def check_quarantined_usage(folder: Path) -> Iterator[Finding]:
    """Find quarantined usage, which is not billed."""
    report = QuarantinedUsage(folder).report()
    if report.total:
        message = (
            f"{report.rows} usage rows that the database refused, and {report.unreadable_lines} lines that cannot be "
        )
        message += f"read, lie in {folder} and are not billed"
        command = f"moiety usage restore --data-dir {shlex.quote(str(folder.parent))}"
        yield fail(
            AREA, "usage_quarantined", message, "write them to the database, and check the rows that remain", command
        )


def _is_held(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
