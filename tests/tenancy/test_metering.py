"""Usage that an engine counted for requests of a dead gateway is billed once, at the agreed price."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from moiety_platform.auth.row_scope import row_criteria
from moiety_platform.db.session import Database
from moiety_platform.prices.token_cost import Price
from moiety_platform.quota.kinds import LimitKind, LimitLevel, Unit
from moiety_platform.quota.lease import Charge, WindowId
from moiety_platform.quota.models import LeaseState, Quota, QuotaLease, QuotaWindow
from moiety_platform.quota.store import AbandonedLeases, LeaseStore
from moiety_platform.usage.billing_context import BillingContext, decode_bill, encode_bill
from moiety_platform.usage.metering import MeterReader, charge
from moiety_platform.usage.models import EntryKind, LedgerEntry, UsageHour, UsageRecord
from moiety_platform.usage.queries import UsageFilter, sum_usage
from moiety_platform.usage.row import GATEWAY_KILLED, KILLED, UsageRow
from moiety_platform.usage.store import insert_rows
from moiety_wire.messages import MeteredUsage

NOON = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
DAY = NOON.replace(hour=0, minute=0)
PRICES = {"standard": Price(2_000_000, 500_000, 8_000_000), "flex": Price(1_000_000, 250_000, 4_000_000)}
TOKENS, MONEY = WindowId("q-tokens", DAY), WindowId("q-money", DAY)
PROMPT = 100


def make_row(**changes: Any) -> UsageRow:
    row = UsageRow(
        "chat-1", "ten", "prj", "key", "/v1/chat/completions", "demo", "standard", NOON, "stop", 200, 1, PROMPT, 0, 0,
        None, None, 1.0,
    )  # fmt: skip
    return msgspec.structs.replace(row, **changes)


def make_bill(*, num_choices: int = 1) -> BillingContext:
    cost = PRICES["standard"].cost(PROMPT, 0, 0)
    charges = (Charge(TOKENS, "dead", PROMPT), Charge(MONEY, "dead", cost))
    row = make_row(num_choices=num_choices, cost_nanodollars=cost, charges=charges, **KILLED)
    return BillingContext(row, PRICES, [(TOKENS, Unit.TOKENS), (MONEY, Unit.MONEY)], "dead", num_choices)


def metered(
    bill: BillingContext, *, sequence: int = 0, output: int = 40, cached: int = 0, served: str = "standard"
) -> MeteredUsage:
    return MeteredUsage("dead", f"{bill.row.request_id}-{sequence}", encode_bill(bill), served, cached, output)


@pytest.fixture
async def leased(database: Database) -> Database:
    """A store in which the gateway that died held leases of 1,000 tokens and of money."""
    async with database.write() as session:
        for window, kind, granted in (
            (TOKENS, LimitKind.TOKENS_PER_DAY, 1000),
            (MONEY, LimitKind.MONEY_PER_DAY, 10**9),
        ):
            quota = Quota(id=window.quota_id, level=LimitLevel.TENANT, scope_id="ten", kind=kind, cap=granted)
            quota.created_at = NOON
            session.add(quota)
            session.add(QuotaWindow(quota_id=window.quota_id, start=window.start, granted=granted, settled=0))
            lease = QuotaLease(quota_id=window.quota_id, start=window.start, replica_id="dead", granted=granted)
            lease.settled, lease.expires_ms, lease.state = 0, 0, LeaseState.QUARANTINED
            session.add(lease)
    return database


async def charge_all(database: Database, *records: MeteredUsage) -> list[bool]:
    done = []
    for record in records:
        async with database.write() as session:
            done.append(await charge(session, record))
    return done


class UsageRecords:
    """All records of usage."""

    def __init__(self, request: UsageRecord, entries: list[LedgerEntry], hours: list[UsageHour], settled: Any) -> None:
        self.request, self.entries, self.hours, self.settled = request, entries, hours, settled

    def agree(self) -> bool:
        names = ("prompt_tokens", "cached_tokens", "output_tokens", "cost_nanodollars")
        of_request = [getattr(self.request, name) for name in names]
        of_entries = [sum(getattr(entry, name) for entry in self.entries) for name in names]
        of_hours = [sum(getattr(hour, name) for hour in self.hours) for name in names]
        return of_request == of_entries == of_hours and sum(hour.requests for hour in self.hours) == 1


async def usage_records(database: Database) -> UsageRecords:
    async with database.read() as session:
        request = (await session.scalars(select(UsageRecord))).one()
        entries = list(await session.scalars(select(LedgerEntry).order_by(LedgerEntry.kind, LedgerEntry.sequence)))
        hours = list(await session.scalars(select(UsageHour)))
        windows = {w.quota_id: w.settled for w in await session.scalars(select(QuotaWindow))}
        leases = {w.quota_id: w.settled for w in await session.scalars(select(QuotaLease))}
    assert windows == leases
    return UsageRecords(request, entries, hours, windows)


async def test_a_request_of_which_nothing_is_stored_is_billed_whole_and_once(leased: Database) -> None:
    record = metered(make_bill(), output=40, cached=60)
    assert await charge_all(leased, record, record) == [True, False]
    found = await usage_records(leased)
    assert (found.request.outcome, found.request.error_code) == ("failed", GATEWAY_KILLED)
    assert (found.request.prompt_tokens, found.request.cached_tokens, found.request.output_tokens) == (PROMPT, 60, 40)
    cost = PRICES["standard"].cost(PROMPT, 60, 40)
    assert found.request.cost_nanodollars == cost
    assert found.settled == {"q-tokens": PROMPT + 40, "q-money": cost}
    assert found.agree()


async def test_a_row_that_another_gateway_stored_is_completed_from_the_engines_count(leased: Database) -> None:
    bill = make_bill()
    async with leased.write() as session:
        await insert_rows(session, [bill.row])  # the live log, replayed
    assert (await usage_records(leased)).settled["q-tokens"] == PROMPT
    assert await charge_all(leased, metered(bill, output=7)) == [True]
    found = await usage_records(leased)
    assert [entry.kind for entry in found.entries] == [EntryKind.METERED, EntryKind.SETTLED]
    assert found.settled["q-tokens"] == PROMPT + 7
    assert found.agree()


async def test_a_row_that_its_own_gateway_stored_is_not_changed(leased: Database) -> None:
    bill = make_bill()
    own = make_row(outcome="disconnected", output_tokens=38, charges=(Charge(TOKENS, "dead", PROMPT + 38),))
    async with leased.write() as session:
        await insert_rows(session, [own])
    assert await charge_all(leased, metered(bill, output=41)) == [False]
    found = await usage_records(leased)
    assert (found.request.output_tokens, found.settled["q-tokens"]) == (38, PROMPT + 38)
    assert found.agree()


async def test_each_of_several_answers_is_billed_once_and_the_prompts_cache_hits_with_the_first(
    leased: Database,
) -> None:
    bill = make_bill(num_choices=2)
    records = [metered(bill, sequence=s, output=10 + s, cached=30) for s in (1, 0, 1)]
    assert await charge_all(leased, *records) == [True, True, False]
    found = await usage_records(leased)
    assert (found.request.cached_tokens, found.request.output_tokens) == (30, 21)
    assert found.request.cost_nanodollars == PRICES["standard"].cost(PROMPT, 30, 21)
    assert found.agree()


async def test_inputs_that_were_embedded_are_billed_their_prompts_and_each_its_own_cache_hits(leased: Database) -> None:
    bill = make_bill()
    bill = msgspec.structs.replace(bill, row=msgspec.structs.replace(bill.row, num_choices=3))
    assert (
        await charge_all(leased, *(metered(bill, sequence=s, output=0, cached=10 + s) for s in range(3))) == [True] * 3
    )
    found = await usage_records(leased)
    assert (found.request.prompt_tokens, found.request.cached_tokens, found.request.output_tokens) == (PROMPT, 33, 0)
    assert found.request.cost_nanodollars == PRICES["standard"].cost(PROMPT, 33, 0)
    assert found.agree()


async def test_bytes_of_experts_of_answers_are_added_up(leased: Database) -> None:
    bill = make_bill()
    records = [
        msgspec.structs.replace(metered(bill), expert_read_bytes=10**13, expert_moved_bytes=7),
        msgspec.structs.replace(metered(bill, output=60), expert_read_bytes=10**13 + 1, expert_moved_bytes=0),
    ]
    assert await charge_all(leased, *records) == [True, True]
    found = await usage_records(leased)
    assert (found.request.expert_read_bytes, found.request.expert_moved_bytes) == (2 * 10**13 + 1, 7)
    assert sum(hour.expert_read_bytes for hour in found.hours) == 2 * 10**13 + 1
    assert found.agree()


async def test_bytes_of_experts_of_a_repeated_or_shorter_count_are_not_added(leased: Database) -> None:
    bill = make_bill()
    longer = msgspec.structs.replace(metered(bill, output=60), expert_read_bytes=10**13, expert_moved_bytes=7)
    shorter = msgspec.structs.replace(metered(bill, output=40), expert_read_bytes=5, expert_moved_bytes=5)
    assert await charge_all(leased, longer, longer, shorter) == [True, False, False]
    found = await usage_records(leased)
    assert (found.request.expert_read_bytes, found.request.expert_moved_bytes) == (10**13, 7)
    assert found.agree()


async def test_a_downgraded_request_costs_what_the_class_that_served_it_costs(leased: Database) -> None:
    assert await charge_all(leased, metered(make_bill(), served="flex")) == [True]
    found = await usage_records(leased)
    cost = PRICES["flex"].cost(PROMPT, 0, 40)
    assert (found.request.service_class, found.request.cost_nanodollars) == ("flex", cost)
    assert found.settled["q-money"] == cost
    assert found.agree()
    assert {hour.service_class for hour in found.hours if hour.requests} == {"flex"}


def test_the_bill_of_an_earlier_release_keeps_its_slo_outcome() -> None:
    bill = make_bill()
    record = metered(bill)
    former = record.billing_context.replace(b"slo_attained", b"sla_attained")
    assert former != record.billing_context
    assert decode_bill(former) == bill
    assert bill.row.slo_attained is False


async def test_a_bill_that_is_none_is_refused_and_nothing_changes(leased: Database) -> None:
    with pytest.raises(msgspec.MsgspecError):
        await charge_all(leased, MeteredUsage("dead", "chat-1-0", b"\x01", "standard", 0, 5))
    async with leased.read() as session:
        assert (await session.scalars(select(UsageRecord))).all() == []


async def test_hours_are_those_in_which_requests_started(leased: Database) -> None:
    rows = [make_row(request_id=f"r{n}", started_at=NOON + timedelta(minutes=20 * n), ttft_ms=5.0) for n in range(3)]
    async with leased.write() as session:
        await insert_rows(session, rows)
    async with leased.read() as session:
        hours = list(await session.scalars(select(UsageHour).order_by(UsageHour.hour)))
    assert [(hour.hour.hour, hour.requests, hour.num_ttft, hour.ttft_ms) for hour in hours] == [
        (12, 2, 2, 10.0),
        (13, 1, 1, 5.0),
    ]


async def test_quota_proven_unused_is_released_and_late_notes_of_it_are_ignored(
    leased: Database,
) -> None:
    store = LeaseStore("alive", 20.0)
    assert await charge_all(leased, metered(make_bill(), output=40)) == [True]
    async with leased.write() as session:
        (found,) = (await store.quarantined(session)).items()
        assert found == ("dead", AbandonedLeases(pytest.approx(time.time() + 20, abs=60), 2))
        assert await store.release_quarantined(session, "dead") == 2
    async with leased.read() as session:
        assert await store.quarantined(session) == {}
        windows = {w.quota_id: (w.granted, w.settled) for w in await session.scalars(select(QuotaWindow))}
    assert windows["q-tokens"] == (PROMPT + 40, PROMPT + 40)
    never_sent = msgspec.structs.replace(make_bill().row, request_id="chat-2")
    async with leased.write() as session:
        await insert_rows(session, [never_sent])
    async with leased.read() as session:
        row = await session.get(UsageRecord, "chat-2")
        window = await session.get(QuotaWindow, ("q-tokens", DAY))
    assert row is not None and window is not None
    assert (row.prompt_tokens, row.cost_nanodollars, window.settled) == (0, 0, PROMPT + 40)


@pytest.mark.parametrize(
    ("since", "until"),
    [(0, 300), (0, 299), (1, 301), (10, 20), (59, 61), (60, 120), (30, 200), (125, 126)],
)
async def test_sums_are_those_of_the_requests_wherever_the_time_is_cut(
    database: Database, since: int, until: int
) -> None:
    start = NOON.replace(minute=0)
    rng = random.Random(0)
    rows = [
        make_row(
            request_id=f"r{n}", started_at=start + timedelta(minutes=n), key_id=f"k{n % 3}",
            outcome=rng.choice(["stop", "failed", "rejected", "disconnected"]), output_tokens=n,
            ttft_ms=rng.choice([None, float(n)]), slo_attained=rng.choice([None, True, False]), cost_nanodollars=n * n,
        )
        for n in range(300)
    ]  # fmt: skip
    async with database.write() as session:
        await insert_rows(session, rows)
    wanted = UsageFilter(start + timedelta(minutes=since), start + timedelta(minutes=until))
    inside = rows[since:until]
    async with database.read() as session:
        (whole,) = (await sum_usage(session, wanted, ())).data
        by_key = await sum_usage(session, wanted, ("key", "hour"))
    totals = whole.totals
    assert totals.requests == len(inside) == sum(group.totals.requests for group in by_key.data)
    assert totals.failed == sum(row.outcome == "failed" for row in inside)
    assert totals.output_tokens == sum(row.output_tokens for row in inside)
    assert totals.cost_nanodollars == sum(row.cost_nanodollars for row in inside)
    ttft = [row.ttft_ms for row in inside if row.ttft_ms is not None]
    promised = [row.slo_attained for row in inside if row.slo_attained is not None]
    assert totals.mean_ttft_ms == (pytest.approx(sum(ttft) / len(ttft)) if ttft else None)
    assert totals.attainment == (pytest.approx(sum(promised) / len(promised)) if promised else None)


async def test_an_administrator_of_one_tenant_sees_only_its_usage_in_whole_and_partial_hours(
    database: Database,
) -> None:
    rows = [
        make_row(request_id=f"{tenant}{n}", tenant_id=tenant, started_at=NOON + timedelta(minutes=30 * n))
        for tenant in ("own", "other")
        for n in range(8)
    ]
    async with database.write() as session:
        await insert_rows(session, rows)
    wanted = UsageFilter(NOON, NOON + timedelta(hours=10))
    async with database.restricted(row_criteria("own")).read() as session:
        groups = (await sum_usage(session, wanted, ("tenant",))).data
    assert [(group.group["tenant_id"], group.totals.requests) for group in groups] == [("own", 8)]


async def test_the_longer_of_two_engines_counts_is_billed_in_either_order(
    leased: Database,
) -> None:
    bill = make_bill()
    records = [metered(bill, output=40), metered(bill, output=400), metered(bill, output=60)]
    assert await charge_all(leased, *records) == [True, True, False]
    found = await usage_records(leased)
    assert (found.request.output_tokens, found.settled["q-tokens"]) == (400, PROMPT + 400)
    assert found.request.cost_nanodollars == PRICES["standard"].cost(PROMPT, 0, 400)
    assert found.agree()


async def test_late_rows_of_a_gateway_presumed_dead_replace_those_stored_for_it(
    leased: Database,
) -> None:
    bill = make_bill()
    assert await charge_all(leased, metered(bill, output=40)) == [True]
    cost = PRICES["standard"].cost(PROMPT, 10, 90)
    own = make_row(
        outcome="stop",
        output_tokens=90,
        cached_tokens=10,
        cost_nanodollars=cost,
        charges=(Charge(TOKENS, "dead", PROMPT + 90), Charge(MONEY, "dead", cost)),
    )
    for _ in range(2):
        async with leased.write() as session:
            await insert_rows(session, [own])
    found = await usage_records(leased)
    assert (found.request.outcome, found.request.output_tokens, found.request.error_code) == ("stop", 90, None)
    assert found.settled == {"q-tokens": PROMPT + 90, "q-money": cost}
    assert found.agree()
    assert await charge_all(leased, metered(bill, output=400)) == [False]


async def test_usage_after_the_release_of_its_lease_is_booked(leased: Database) -> None:
    store = LeaseStore("alive", 20.0)
    async with leased.write() as session:
        assert await store.release_quarantined(session, "dead") == 2
    own = make_row(outcome="stop", output_tokens=50, charges=(Charge(TOKENS, "dead", PROMPT + 50),))
    async with leased.write() as session:
        await insert_rows(session, [own])
    found = await usage_records(leased)
    assert found.settled["q-tokens"] == PROMPT + 50
    async with leased.read() as session:
        window = await session.get(QuotaWindow, ("q-tokens", DAY))
    assert window is not None
    assert window.granted == PROMPT + 50


async def test_usage_of_a_running_request_is_left_to_its_own_row(leased: Database) -> None:
    held = {"chat-1"}
    reader = MeterReader(leased, held.__contains__)
    settled: asyncio.Queue[list[str]] = asyncio.Queue()
    await reader.start()
    other = msgspec.structs.replace(make_bill(), row=msgspec.structs.replace(make_bill().row, request_id="chat-2"))
    records = [metered(make_bill()), metered(other)]
    async with asyncio.timeout(60):
        reader.take(records, lambda _, request_ids: settled.put_nowait(request_ids))
        assert await settled.get() == ["chat-2-0"]
        held.clear()
        reader.take(records, lambda _, request_ids: settled.put_nowait(request_ids))
        assert await settled.get() == ["chat-1-0"]
    await reader.stop()
    assert reader.num_charged == 2
