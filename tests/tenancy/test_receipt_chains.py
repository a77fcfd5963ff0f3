"""Chains of receipts in the store: in the transaction of the usage row, once, and without forks. On both databases."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select
from tests.usage_rows import make_row

from moiety_platform.db.session import Database
from moiety_platform.receipts.content import ReceiptDraft, hash_of
from moiety_platform.receipts.models import ReceiptChain, ReceiptRecord
from moiety_platform.receipts.verification import check_chain
from moiety_platform.tenant_deletion.names import blank_receipts
from moiety_platform.usage.journal import to_line
from moiety_platform.usage.recorder import UsageRecorder
from moiety_platform.usage.row import KILLED, StoredUsageRow, UsageRow
from moiety_platform.usage.store import insert_rows

from .test_recorder import record_and_be_killed

DRAFT = ReceiptDraft("0" * 32, {"sampling": {"seed": 1}}, [{"model": "demo"}], None, ["aa"], ["bb"])


def asking(request_id: str, tenant_id: str = "ten_a", **fields: object) -> UsageRow:
    return make_row(request_id, tenant_id=tenant_id, receipt=DRAFT, **fields)


async def chain_of(database: Database, tenant_id: str = "ten_a") -> list[ReceiptRecord]:
    async with database.read() as session:
        wanted = select(ReceiptRecord).where(ReceiptRecord.tenant_id == tenant_id).order_by(ReceiptRecord.sequence)
        return list(await session.scalars(wanted))


async def check(database: Database, num_receipts: int, tenant_id: str = "ten_a") -> list[ReceiptRecord]:
    """Check that the chain has this many receipts, each linked to the one before, and the head of the last."""
    records = await chain_of(database, tenant_id)
    contents = [json.loads(record.content or "") for record in records]
    assert [record.sequence for record in records] == list(range(1, num_receipts + 1))
    assert [record.hash for record in records] == list(map(hash_of, contents))
    assert check_chain(contents) == num_receipts
    async with database.read() as session:
        chain = await session.get_one(ReceiptChain, tenant_id)
    assert (chain.num_receipts, chain.head) == (num_receipts, records[-1].hash)
    return records


async def test_rows_with_a_receipt_are_chained_and_others_are_not(database: Database) -> None:
    async with database.write() as session:
        await insert_rows(session, [asking("a"), make_row("b"), asking("c"), asking("d", "ten_b")])
    records = await check(database, 2)
    assert [record.request_id for record in records] == ["a", "c"]
    await check(database, 1, "ten_b")


async def test_a_row_that_is_written_again_has_one_receipt(database: Database) -> None:
    for _ in range(3):
        async with database.write() as session:
            await insert_rows(session, [asking("a"), asking("a")])
    await check(database, 1)


async def test_a_transaction_that_fails_leaves_no_receipt(database: Database) -> None:
    with pytest.raises(ZeroDivisionError):
        async with database.write() as session:
            await insert_rows(session, [asking("a")])
            raise ZeroDivisionError
    assert await chain_of(database) == []


async def test_gateways_that_append_at_once_make_one_chain_without_forks(database: Database, second: Database) -> None:
    async def write(store: Database, name: str) -> None:
        for number in range(20):
            async with store.write() as session:
                await insert_rows(session, [asking(f"{name}-{number}-{i}", f"ten_{'ab'[i % 2]}") for i in range(4)])

    await asyncio.gather(
        *(write(store, f"{name}{n}") for name, store in (("x", database), ("y", second)) for n in "12")
    )
    await check(database, 160)
    await check(database, 160, "ten_b")


async def test_the_receipt_of_a_request_whose_gateway_was_wrongly_taken_for_dead_is_that_of_its_end(
    database: Database,
) -> None:
    async with database.write() as session:
        await insert_rows(session, [msgspec.structs.replace(make_row("a"), **KILLED)])
    async with database.write() as session:
        await insert_rows(session, [asking("a", cost_nanodollars=5)])
    (record,) = await check(database, 1)
    assert json.loads(record.content or "")["price"]["cost_nanodollars"] == 5


async def test_a_killed_gateway_leaves_the_receipt_in_its_journal(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    await record_and_be_killed(database_url, tmp_path, [asking("a")])
    assert await chain_of(database) == []
    for _ in range(2):  # a second start finds nothing more
        recorder = UsageRecorder(database, tmp_path)
        await recorder.start()
        await recorder.flush()
        await recorder.stop()
    (record,) = await check(database, 1)
    assert record.salt == DRAFT.salt


def test_a_line_of_the_journal_has_all_of_the_receipt() -> None:
    row = asking("a")
    assert msgspec.json.decode(to_line(row), type=StoredUsageRow).present == row


async def test_deleting_a_tenants_data_keeps_numbers_and_hashes_alone(database: Database) -> None:
    async with database.write() as session:
        await insert_rows(session, [asking("a"), asking("b"), asking("c", "ten_b")])
    before = await check(database, 2)
    async with database.write() as session:
        assert (await blank_receipts(session, "ten_a")).total() == 2
    async with database.write() as session:
        assert (await blank_receipts(session, "ten_a")).total() == 0
    after = await chain_of(database)
    assert [(one.content, one.salt) for one in after] == [(None, None)] * 2
    assert [(one.sequence, one.hash) for one in after] == [(one.sequence, one.hash) for one in before]
    await check(database, 1, "ten_b")
    async with database.write() as session:
        await insert_rows(session, [asking("d")])
    newest = (await chain_of(database))[-1]
    assert json.loads(newest.content or "")["previous"] == before[-1].hash
