"""Reconciliation finds differences between the ledger's sums, and between bills and engines' journals."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update

from moiety_platform.cli.engine_journals import compare, read_journals
from moiety_platform.cli.errors import CommandError
from moiety_platform.db.session import Database
from moiety_platform.quota.models import LeaseState, QuotaLease, QuotaWindow
from moiety_platform.usage.models import LedgerEntry, UsageHour, UsageRecord
from moiety_platform.usage.reconciliation import Amounts, Reconciliation, reconcile
from moiety_platform.usage.row import UsageRow
from moiety_platform.usage.store import insert_rows

NOON = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


def make_row(request_id: str, tenant_id: str) -> UsageRow:
    return UsageRow(
        request_id, tenant_id, "prj", "key", "/v1", "demo", "standard", NOON, "stop", 200, 1, 10, 4, 7, None, None, 1.0,
        cost_nanodollars=30,
    )  # fmt: skip


@pytest.fixture
async def used(database: Database) -> Database:
    async with database.write() as session:
        await insert_rows(session, [make_row(f"{tenant}-{n}", tenant) for tenant in ("a", "b") for n in range(3)])
    return database


async def compared(database: Database) -> Reconciliation:
    async with database.read() as session:
        return await reconcile(session, NOON - timedelta(minutes=5), NOON + timedelta(minutes=5))


async def test_reconciliation_reports_agreement(used: Database) -> None:
    found = await compared(used)
    assert found.agrees
    assert (found.tenants, found.total) == (2, Amounts(6, 60, 24, 42, 180))
    assert (found.since, found.until) == (NOON.replace(minute=0), NOON.replace(hour=13, minute=0))


@pytest.mark.parametrize(
    "damage",
    [
        update(LedgerEntry).where(LedgerEntry.request_id == "b-1").values(output_tokens=8),
        delete(LedgerEntry).where(LedgerEntry.request_id == "b-1"),
        update(UsageHour).where(UsageHour.tenant_id == "b").values(cost_nanodollars=UsageHour.cost_nanodollars - 1),
        delete(UsageRecord).where(UsageRecord.request_id == "b-1"),
    ],
)
async def test_reconciliation_names_tenants_with_differences(used: Database, damage: Any) -> None:
    async with used.write() as session:
        await session.execute(damage)
    found = await compared(used)
    assert not found.agrees
    assert [difference.tenant_id for difference in found.differences] == ["b"]


async def test_limits_that_do_not_add_up_and_leases_in_quarantine_are_listed(used: Database) -> None:
    lease = {"start": NOON, "expires_ms": 0}
    async with used.write() as session:
        for quota_id, of_lease in (("good", 5), ("bad", 4)):
            session.add(QuotaWindow(quota_id=quota_id, start=NOON, granted=9, settled=5))
            session.add(
                QuotaLease(
                    quota_id=quota_id, replica_id="dead", granted=9, settled=of_lease, state=LeaseState.QUARANTINED,
                    **lease,
                )
            )  # fmt: skip
    found = await compared(used)
    assert not found.agrees
    assert [(window.quota_id, window.settled, window.settled_by_leases) for window in found.windows] == [("bad", 5, 4)]
    assert [(one.replica_id, one.leases, one.amount) for one in found.quarantined] == [("dead", 2, 9)]


def write_journal(path: Path, *lines: tuple[str, int]) -> Path:
    text = [json.dumps({"at_unix_ns": 2 * 10**18, "request_id": r, "output_tokens": n, "more": 1}) for r, n in lines]
    path.write_text("\n".join(text) + "\n")
    return path


def test_bills_are_compared_with_what_engines_counted(tmp_path: Path) -> None:
    first = write_journal(tmp_path / "a", ("chat-1-0", 5), ("chat-1-1", 6), ("chat-2-0", 3), ("chat-4-0", 1))
    second = write_journal(tmp_path / "b", ("chat-2-0", 9), ("chat-3-0", 4))
    counted = read_journals([first, second], datetime(2026, 1, 1, tzinfo=UTC))
    requests = {
        "chat-1": {"outcome": "stop", "output_tokens": 11},
        "chat-2": {"outcome": "stop", "output_tokens": 9},  # went on at the second engine
        "chat-3": {"outcome": "stop", "output_tokens": 5},
        "chat-4": {"outcome": "rejected", "output_tokens": 0},
        "chat-5": {"outcome": "stop", "output_tokens": 2},
    }
    assert compare(counted, requests) == {
        "compared": 3,
        "unproven": 1,
        "differences": [{"request_id": "chat-3", "billed": 5, "counted": 4}],
    }
    assert compare(counted, {})["differences"][0] == {"request_id": "chat-1", "billed": None, "counted": 11}


def test_reconciliation_leaves_out_requests_that_ended_before_the_range(tmp_path: Path) -> None:
    journal = write_journal(tmp_path / "a", ("chat-1-0", 5))
    assert read_journals([journal], datetime(2034, 1, 1, tzinfo=UTC)) == {}


def test_a_file_that_is_no_journal_is_named_with_its_line(tmp_path: Path) -> None:
    journal = write_journal(tmp_path / "a", ("chat-1-0", 5))
    journal.write_text(journal.read_text() + "no JSON\n")
    with pytest.raises(CommandError, match="line 2"):
        read_journals([journal], datetime(2026, 1, 1, tzinfo=UTC))
