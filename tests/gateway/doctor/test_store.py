"""`moiety doctor` on the database and what lies beside it: faults that are planted are found, and its advice mends."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import insert, text, update
from tests.conftest import free_port

from moiety_migrations import HEAD, downgrade
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.pepper import pepper_of, pepper_rotation_of
from moiety_platform.cli.gateway import ensure_first_keys
from moiety_platform.clock import SystemClock
from moiety_platform.db.session import Database
from moiety_platform.prices.schemas import NewPrice
from moiety_platform.prices.service import set_price
from moiety_platform.quota.kinds import LimitKind
from moiety_platform.quota.models import LeaseState, Quota, QuotaLease, QuotaWindow
from moiety_platform.quota.store import LeaseStore
from moiety_platform.tenants.models import ApiKey
from moiety_platform.usage.days import day_of, unmark
from moiety_platform.usage.journal import append_lines, create_segment, to_line
from moiety_platform.usage.models import UsageDayMark, UsageHour
from moiety_platform.usage.quarantined_rows import QuarantinedUsage
from moiety_platform.usage.recorder import UsageRecorder
from moiety_platform.usage.row import UsageRow

from .conftest import Fault, Heals, World, complaints, each_fault

ROW = UsageRow(
    request_id="r-left", tenant_id="ten_a", project_id="prj_a", key_id="key_a", endpoint="/v1/chat/completions",
    model="demo", service_class="standard", started_at=datetime.now(UTC), outcome="stop", http_status=200,
    num_choices=1, prompt_tokens=10, cached_tokens=4, output_tokens=7, queue_ms=0.5, ttft_ms=12.25, duration_ms=40.0,
)  # fmt: skip


WINDOW = {"quota_id": "quo_a", "start": datetime(2026, 11, 1, tzinfo=UTC), "granted": 10, "settled": 4}
LEASE = {"replica_id": "gateway-that-died", "expires_ms": 0, "state": LeaseState.LIVE}


class ClockAhead(SystemClock):
    """The clock of a machine without a time server."""

    def now(self) -> datetime:
        return super().now() + timedelta(minutes=5)


async def no_tables(world: World) -> AsyncIterator[Any]:
    (world.patient.settings.data_dir / "moiety.db").unlink()
    advice: Any = yield world.patient
    world.run(advice.command)
    await ensure_first_keys(world.patient.settings, reissue=False)
    yield replace(world.patient, admin_key=None)


async def another_folder(world: World) -> AsyncIterator[Any]:
    yield world.changed(data_dir=world.patient.settings.data_dir / "elsewhere")
    yield world.patient


async def schema_of_an_older_release(world: World) -> AsyncIterator[Any]:
    downgrade(world.patient.settings.store_url, "0015")
    advice: Any = yield world.patient
    world.run(advice.command)
    yield world.patient


async def schema_of_a_newer_release(world: World) -> AsyncIterator[Any]:
    database = Database.open(world.patient.settings.store_url)
    async with database.write() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    yield world.patient
    async with database.write() as session:  # the newer release went back
        await session.execute(text("UPDATE alembic_version SET version_num = :head"), {"head": HEAD})
    await database.close()
    yield world.patient


async def database_at_another_port(world: World) -> AsyncIterator[Any]:
    yield world.changed(database_url=f"postgresql://moiety@127.0.0.1:{free_port()}/moiety")
    yield world.patient  # the URL was corrected


async def pepper_lost(world: World) -> AsyncIterator[Any]:
    pepper = world.patient.settings.data_dir / "pepper"
    backup = pepper.read_text()
    pepper.unlink()
    yield world.patient
    pepper.write_text(backup)
    pepper.chmod(0o600)
    yield world.patient


async def replaced_pepper(world: World, pepper: str) -> AsyncIterator[Any]:
    """Replace the deployment's pepper by this one, and put it back."""
    file = world.patient.settings.data_dir / "pepper"
    backup = file.read_text()
    file.write_text(pepper)
    yield world.patient
    file.write_text(backup)
    yield world.patient


def pepper_of_another_deployment(world: World) -> AsyncIterator[Any]:
    return replaced_pepper(world, "another pepper that is long enough")


def pepper_that_is_too_short(world: World) -> AsyncIterator[Any]:
    return replaced_pepper(world, "hunter2")


async def pepper_that_all_can_read(world: World, *, is_previous: bool = False) -> AsyncIterator[Any]:
    if is_previous:
        await replace_pepper(world)
    (world.patient.settings.data_dir / ("pepper.previous" if is_previous else "pepper")).chmod(0o644)
    advice: Any = yield world.patient
    world.run(advice.command)
    yield world.patient


def previous_pepper_that_all_can_read(world: World) -> AsyncIterator[Any]:
    return pepper_that_all_can_read(world, is_previous=True)


async def pepper_that_is_being_replaced(world: World) -> AsyncIterator[Any]:
    await replace_pepper(world)
    yield world.patient
    await use_keys(world)  # of a gateway with both peppers
    (world.patient.settings.data_dir / "pepper.previous").unlink()
    yield world.patient


async def previous_pepper_that_nobody_needs(world: World) -> AsyncIterator[Any]:
    await replace_pepper(world)
    await use_keys(world)
    yield world.patient
    (world.patient.settings.data_dir / "pepper.previous").unlink()
    yield world.patient


async def replace_pepper(world: World) -> None:
    data_dir = world.patient.settings.data_dir
    (data_dir / "pepper").rename(data_dir / "pepper.previous")
    pepper_of(world.patient.settings)  # as a gateway that starts makes it


async def use_keys(world: World) -> None:
    settings = world.patient.settings
    database = Database.open(settings.store_url)
    authenticator = Authenticator(database, pepper_of(settings), SystemClock(), turn=pepper_rotation_of(settings))
    for key in (world.patient.admin_key, world.tenant_key):
        await authenticator.authenticate(f"Bearer {key}")
    await authenticator.rehashing.idle()
    await database.close()


async def no_owner_left(world: World) -> AsyncIterator[Any]:
    database = Database.open(world.patient.settings.store_url)
    async with database.write() as session:
        await session.execute(update(ApiKey).values(revoked_at=datetime.now(UTC)))
    await database.close()
    yield world.patient
    await ensure_first_keys(world.patient.settings, reissue=True)  # as a gateway does, started with --first-keys
    yield world.patient


async def usage_of_a_killed_gateway(world: World) -> AsyncIterator[Any]:
    folder = world.patient.settings.data_dir / "usage-journal"
    folder.mkdir()
    _, descriptor = create_segment(folder)
    append_lines(descriptor, to_line(ROW) + b"\n")
    os.close(descriptor)
    yield world.patient
    database = Database.open(world.patient.settings.store_url)
    recorder = UsageRecorder(database, folder)  # of a gateway that starts
    await recorder.start()
    await recorder.stop()
    await database.close()
    yield world.patient


async def usage_in_quarantine(world: World) -> AsyncIterator[Any]:
    QuarantinedUsage(world.patient.settings.usage_journal_dir).add_row(ROW)
    advice: Any = yield world.patient
    world.run(advice.command)
    yield world.patient


async def clock_that_runs_ahead(world: World) -> AsyncIterator[Any]:
    world.clock = ClockAhead()
    yield world.patient
    world.clock = SystemClock()
    yield world.patient


async def books_that_differ(world: World) -> AsyncIterator[Any]:
    database = Database.open(world.patient.settings.store_url)
    await record(world, database, ROW)
    async with database.write() as session:
        await session.execute(update(UsageHour).values(output_tokens=UsageHour.output_tokens + 1))
    yield world.patient
    async with database.write() as session:  # the half that was missing is stored
        await session.execute(update(UsageHour).values(output_tokens=UsageHour.output_tokens - 1))
    await database.close()
    yield world.patient


async def sums_of_a_day_that_differ(world: World) -> AsyncIterator[Any]:
    database = Database.open(world.patient.settings.store_url)
    yesterday = day_of(datetime.now(UTC)) - timedelta(days=1)
    await record(world, database, msgspec.structs.replace(ROW, started_at=yesterday + timedelta(hours=12)))
    async with database.write() as session:
        await session.merge(UsageDayMark(day=yesterday, is_done=True))  # and no sums
    yield world.patient
    async with database.write() as session:
        await unmark(session, [yesterday])  # retention sums it up anew
    await database.close()
    yield world.patient


async def limit_that_its_leases_do_not_add_up_to(world: World) -> AsyncIterator[Any]:
    database = Database.open(world.patient.settings.store_url)
    async with database.write() as session:
        await session.execute(insert(QuotaWindow).values(WINDOW))
    yield world.patient
    async with database.write() as session:  # the half that was missing is stored
        await session.execute(insert(QuotaLease).values(WINDOW | LEASE))
    await database.close()
    yield world.patient


async def leases_of_gateways_that_died(world: World) -> AsyncIterator[Any]:
    database = Database.open(world.patient.settings.store_url)
    async with database.write() as session:
        await session.execute(insert(QuotaWindow).values(WINDOW))
        await session.execute(insert(QuotaLease).values(WINDOW | LEASE | {"state": LeaseState.QUARANTINED}))
    yield world.patient
    async with database.write() as session:  # as gateways do, once engines have proven it
        await LeaseStore("another", 20.0).release_quarantined(session, LEASE["replica_id"])
    await database.close()
    yield world.patient


async def model_without_a_price_under_a_limit_in_money(world: World) -> AsyncIterator[Any]:
    database = Database.open(world.patient.settings.store_url)
    await record(world, database, ROW)
    async with database.write() as session:
        limit = {"id": "quo_a", "level": "tenant", "scope_id": "ten_a", "kind": LimitKind.MONEY_PER_DAY, "cap": 5}
        await session.execute(insert(Quota).values(**limit, created_at=datetime.now(UTC)))
    yield world.patient
    async with database.write() as session:  # by the command's way
        await set_price(session, NewPrice(model=ROW.model, input="0.15", output="0.60"))
    await database.close()
    yield world.patient


async def record(world: World, database: Database, row: UsageRow) -> None:
    recorder = UsageRecorder(database, world.patient.settings.data_dir / "usage-journal")
    await recorder.start()
    recorder.record(row)
    await recorder.stop()


@each_fault(
    {
        "store": {
            no_tables: "database_behind",
            another_folder: "data_dir_missing",
            schema_of_an_older_release: "database_behind",
            schema_of_a_newer_release: "database_newer",
            database_at_another_port: "database_away",
            pepper_lost: "pepper_missing",
            pepper_that_is_too_short: "pepper_bad",
            pepper_of_another_deployment: "pepper_other",
            pepper_that_all_can_read: "pepper_open",
            pepper_that_is_being_replaced: "pepper_turning",
            previous_pepper_that_nobody_needs: "pepper_previous",
            no_owner_left: "no_owner",
            usage_of_a_killed_gateway: "usage_left",
            usage_in_quarantine: "usage_quarantined",
            clock_that_runs_ahead: "clock_skew",
            books_that_differ: "books_differ",
            sums_of_a_day_that_differ: "days_differ",
            limit_that_its_leases_do_not_add_up_to: "limits_drift",
            leases_of_gateways_that_died: "quarantined",
            model_without_a_price_under_a_limit_in_money: "price_missing",
        }
    }
)
async def test_advice_mends_a_planted_fault(heals: Heals, area: str, fault: Fault, code: str) -> None:
    assert await heals(fault, area) == ([code], [])


async def test_doctor_reports_a_world_readable_previous_pepper(
    heals: Heals,
) -> None:
    found, left = await heals(previous_pepper_that_all_can_read, "store")
    assert (found, left) == (["pepper_open"], ["pepper_turning"])


async def test_marks_tell_a_pepper_of_another_deployment_without_an_administrators_key(world: World) -> None:
    (world.patient.settings.data_dir / "pepper").write_text("another pepper that is long enough")
    found = await complaints(world, replace(world.patient, admin_key=None), "store")
    assert [one.code for one in found] == ["pepper_other"]
    assert "2 keys: first administrator" in found[0].found
