"""Spend equals usage and the ledger for any time; forecasts and budgets follow from the days, on both databases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import delete, event, func, select
from tests.usage_rows import make_row

from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.service import create_key, rotate_key
from moiety_platform.clock import ManualClock
from moiety_platform.db.paging import PageRequest
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest
from moiety_platform.quota.kinds import LimitKind, LimitLevel
from moiety_platform.quota.models import QuotaWindow
from moiety_platform.quota.schemas import NewQuota
from moiety_platform.quota.service import set_quota
from moiety_platform.spend import queries
from moiety_platform.spend.budgets import list_budgets
from moiety_platform.spend.forecast import RATE_SPAN, forecast_month, rate_of, read_since
from moiety_platform.spend.queries import MAX_MERGED_GROUPS, MergedSpend, forecast_spend, report_spend
from moiety_platform.spend.schemas import SpendGroup, SpendReport, SpendTotals
from moiety_platform.usage.days import DAY, sum_up_some
from moiety_platform.usage.models import LedgerEntry, UsageRecord
from moiety_platform.usage.queries import MAX_GROUPS, UsageFilter
from moiety_platform.usage.reconciliation import take_snapshot_locks
from moiety_platform.usage.store import insert_rows

from .conftest import PEPPER, Admin, Demo

NOW = datetime(2026, 3, 20, 6, tzinfo=UTC)
SPANS = (
    (NOW - 40 * DAY, NOW),
    (datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC)),
    (NOW - timedelta(days=20, minutes=17, seconds=3), NOW - timedelta(days=2, minutes=1)),
    (NOW - timedelta(minutes=50), NOW - timedelta(minutes=10)),
)
GROUPINGS = ("tenant", "project", "key", "model", "service_class", "day", "tenant,model")
ATTRIBUTED = ("end_user", "tag:team", "day,end_user")


@pytest.fixture
async def spent(database: Database, demo: Demo, clock: ManualClock) -> Database:
    """Forty days of requests of two tenants: with credits, end users and tags, and with sums of the past days."""
    clock.advance((NOW - clock.now()).total_seconds())
    rows = [
        make_row(
            f"r{number}", tenant_id=demo.tenant_id if number % 3 else "ten_b", project_id=f"prj_{number % 2}",
            key_id=f"key_{number % 4}", model=f"m{number % 2}", service_class=("standard", "batch")[number % 5 == 0],
            started_at=NOW - timedelta(hours=6.7 * number - 6.5, minutes=number % 60), output_tokens=number,
            cost_nanodollars=number**3 + 7, credit_nanodollars=number * 11 if number % 4 == 0 else 0,
            end_user=f"user-{number % 3}" if number % 3 else None, tags='{"team":"ads"}' if number % 2 else None,
        )
        for number in range(1, 144)
    ]  # fmt: skip
    async with database.write() as session:
        await insert_rows(session, rows)
    async with database.write() as session:
        while await sum_up_some(session, NOW):
            pass
    return database


async def billed(database: Database, since: datetime, until: datetime) -> int:
    """The sum of the ledger."""
    cost = func.coalesce(func.sum(LedgerEntry.cost_nanodollars), 0)
    async with database.read() as session:
        found = await session.scalar(
            select(cost).where(LedgerEntry.started_at >= since, LedgerEntry.started_at < until)
        )
    return int(found or 0)


def shared(group: dict[str, str | None], totals: dict[str, Any]) -> tuple[dict[str, str | None], list[int]]:
    """A group with the figures that both reports have."""
    names = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "credit_nanodollars", "cost_nanodollars")
    return group, [totals[name] for name in names]


def in_query(since: datetime, until: datetime, **more: str) -> dict[str, str]:
    return {"since": since.isoformat(), "until": until.isoformat(), **more}


async def test_spend_of_any_time_and_group_is_that_of_usage_and_of_the_ledger(spent: Database, admin: Admin) -> None:
    for (since, until), grouping in product(SPANS, (*GROUPINGS, *ATTRIBUTED)):
        if grouping in ATTRIBUTED and until - since > 31 * DAY:
            continue
        params = in_query(since, until, group_by=grouping)
        found, usage = [await admin.call("GET", path, 200, params=params) for path in ("spend", "usage")]
        groups = [(one["group"], one["totals"]) for one in found["data"]]
        assert [shared(group, sums) for group, sums in groups] == [
            shared(one["group"], one["totals"]) for one in usage["data"]
        ]
        cost = await billed(spent, since, until)
        assert found["total"]["cost_nanodollars"] == cost > 0
        assert sum(sums["cost_nanodollars"] for _, sums in groups) == cost, (grouping, since)
        assert all(
            sums["cost_before_credits_nanodollars"] - sums["credit_nanodollars"] == sums["cost_nanodollars"]
            for _, sums in groups
        )
    whole = await admin.call("GET", "spend", 200, params=in_query(*SPANS[0]))
    assert whole["data"] == [{"group": {}, "totals": whole["total"]}]
    assert whole["total"]["credit_nanodollars"] > 0 and not whole["truncated"]


@pytest.mark.parametrize("grouping", ATTRIBUTED)
async def test_spend_by_end_user_and_tag_of_a_longer_time_adds_up_its_parts(
    spent: Database, admin: Admin, grouping: str
) -> None:
    since, until = SPANS[0]
    found = await admin.call("GET", "spend", 200, params=in_query(since, until, group_by=grouping))
    ends = [since, since + 31 * DAY, until]
    sums: dict[str, list[int]] = {}
    for begin, end in pairwise(ends):
        part = await admin.call("GET", "usage", 200, params=in_query(begin, end, group_by=grouping))
        for one in part["data"]:
            group, figures = shared(one["group"], one["totals"])
            before = sums.setdefault(str(group), [0] * len(figures))
            sums[str(group)] = [mine + its for mine, its in zip(before, figures, strict=True)]
    listed = [shared(one["group"], one["totals"]) for one in found["data"]]
    assert {str(group): figures for group, figures in listed} == sums
    outputs = [(group.get("day", ""), -figures[3]) for group, figures in listed]
    assert outputs == sorted(outputs)
    assert found["total"]["cost_nanodollars"] == sum(figures[-1] for figures in sums.values())
    assert found["total"]["cost_nanodollars"] == await billed(spent, since, until)
    assert (found["since"], found["until"]) == (since.isoformat()[:19] + "Z", until.isoformat()[:19] + "Z")
    assert not found["truncated"]
    too_long = in_query(until - 1200 * DAY, until, group_by=grouping)
    assert "may span 1116 days" in (await admin.call("GET", "spend", 400, params=too_long))["error"]["message"]


@contextmanager
def statements_of(database: Database) -> Iterator[list[tuple[str, str]]]:
    """Record the statements that are sent, each with its parameters as text."""
    found: list[tuple[str, str]] = []

    def record(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        found.append((statement, str(parameters)))

    event.listen(database.engine.sync_engine, "before_cursor_execute", record)
    yield found
    event.remove(database.engine.sync_engine, "before_cursor_execute", record)


async def test_a_report_of_spend_reads_the_usage_once_and_adds_up_only_what_it_shows(spent: Database) -> None:
    (since, until), *_ = SPANS
    for grouping in GROUPINGS:
        async with spent.read() as session:
            await take_snapshot_locks(session)
            with statements_of(spent) as found:
                report = await report_spend(session, UsageFilter(since, until), grouping.split(","))
        (statement,) = [text for text, _ in found if "usage_hours" in text]
        assert not re.search(r"sum\([a-z0-9_.]*(ttft_ms|expert_read_bytes)", statement)
        assert report.total.cost_nanodollars == await billed(spent, since, until)


async def test_the_total_of_spend_is_of_all_groups_if_some_are_not_listed(
    spent: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    (since, until), *_ = SPANS
    monkeypatch.setattr(queries, "MAX_GROUPS", 2)
    async with spent.read() as session:
        await take_snapshot_locks(session)
        report = await report_spend(session, UsageFilter(since, until), ("key",))
        nothing = await report_spend(session, UsageFilter(since - 2 * DAY, since - DAY), ("key",))
    assert (len(report.data), report.truncated) == (2, True)
    assert report.total.cost_nanodollars == await billed(spent, since, until)
    assert (nothing.data, nothing.total.requests, nothing.truncated) == ([], 0, False)


async def test_the_total_of_a_report_by_end_user_has_requests_whose_rows_are_deleted(spent: Database) -> None:
    since, until = SPANS[1]
    before = await billed(spent, since, until)
    async with spent.write() as session:
        await session.execute(delete(UsageRecord).where(UsageRecord.started_at < NOW - 10 * DAY))
    async with spent.read() as session:
        await take_snapshot_locks(session)
        report = await report_spend(session, UsageFilter(since, until), ("end_user",))
    assert report.total.cost_nanodollars == before > sum(one.totals.cost_nanodollars for one in report.data) > 0


async def test_a_report_up_to_now_reads_the_sums_of_the_present_hour_unless_a_request_is_later(
    spent: Database, demo: Demo, clock: ManualClock
) -> None:
    now = NOW + timedelta(minutes=20)
    rows = [
        make_row(f"now{ago}", tenant_id=demo.tenant_id, cost_nanodollars=10, started_at=now - timedelta(minutes=ago))
        for ago in range(1, 30)
    ]
    later: Any = make_row("later", tenant_id=demo.tenant_id, cost_nanodollars=10**6, started_at=now)
    async with spent.write() as session:
        await insert_rows(session, rows)
        new = NewQuota(LimitLevel.TENANT, demo.tenant_id, LimitKind.MONEY_PER_MONTH, 10**7)
        await set_quota(session, new, clock.now())
    before = await spend_until(spent, demo, now)
    assert [one for one in before[1] if "sum(" in one[0] and is_at(now, one[1])] == []
    async with spent.write() as session:
        await insert_rows(session, [later])
    after = await spend_until(spent, demo, now)
    assert [one for one in after[1] if "sum(" in one[0] and is_at(now, one[1])], "the requests of the hour are read"
    assert before[0] == after[0] == 3 * [await billed_to(spent, demo.tenant_id, now)]


async def spend_until(database: Database, demo: Demo, now: datetime) -> tuple[list[int], list[tuple[str, str]]]:
    """The spend of a month as the report, the forecast and the budget have it, and the statements for it."""
    of_tenant = UsageFilter(SPANS[1][0], now, tenant_id=demo.tenant_id)
    async with database.read() as session:
        await take_snapshot_locks(session)
        with statements_of(database) as found:
            report = await report_spend(session, of_tenant, ("day",))
            forecast = await forecast_spend(session, of_tenant, now)
            (budget,) = (await list_budgets(session, PageRequest(10, None), now, None)).data
    assert budget.rate_nanodollars_per_day == forecast.rate_nanodollars_per_day
    return [report.total.cost_nanodollars, forecast.spent_nanodollars, budget.spent_nanodollars], found


async def billed_to(database: Database, tenant_id: str, until: datetime) -> int:
    cost = func.sum(LedgerEntry.cost_nanodollars)
    in_time = LedgerEntry.started_at >= SPANS[1][0], LedgerEntry.started_at < until
    async with database.read() as session:
        return int(await session.scalar(select(cost).where(LedgerEntry.tenant_id == tenant_id, *in_time)) or 0)


def is_at(moment: datetime, parameters: str) -> bool:
    """Return whether the parameters of a statement contain this time, as one of the databases has it."""
    in_python = f"datetime.datetime({moment.year}, {moment.month}, {moment.day}, {moment.hour}, {moment.minute}"
    return in_python in parameters or f"{moment:%Y-%m-%d %H:%M}:00" in parameters


async def test_groups_of_a_longer_time_have_the_sums_of_all_its_parts(
    database: Database, admin: Admin, demo: Demo, clock: ManualClock
) -> None:
    clock.advance((NOW - clock.now()).total_seconds())
    month_ago, now = NOW - 40 * DAY, NOW - DAY
    used = [(f"user-{number}", month_ago, 10, 3) for number in range(MAX_GROUPS)]
    used += [("late", month_ago, 1, 7), ("late", now, 100, 5)]
    rows = [
        make_row(
            f"r{number}", tenant_id=demo.tenant_id, end_user=user, started_at=at, output_tokens=tokens,
            cost_nanodollars=cost,
        )
        for number, (user, at, tokens, cost) in enumerate(used)
    ]  # fmt: skip
    async with database.write() as session:
        await insert_rows(session, rows)
    params = in_query(NOW - 50 * DAY, NOW, group_by="end_user")
    found = await admin.call("GET", "spend", 200, params=params)
    first, totals = found["data"][0]["group"], found["data"][0]["totals"]
    assert (first, totals["output_tokens"], totals["cost_nanodollars"]) == ({"end_user": "late"}, 101, 12)
    assert found["truncated"] and len(found["data"]) == MAX_GROUPS
    by_day = await admin.call("GET", "spend", 200, params={**params, "group_by": "day,end_user"})
    assert by_day["truncated"] and len(by_day["data"]) == MAX_GROUPS
    assert {one["group"]["day"] for one in by_day["data"]} == {f"{month_ago:%Y-%m-%d}"}


def test_more_groups_than_can_be_summed_up_are_refused() -> None:
    merged, by_day = MergedSpend(("end_user",)), MergedSpend(("day", "end_user"))
    totals = SpendTotals(*[1] * len(SpendTotals.__struct_fields__))
    groups = [SpendGroup({"end_user": f"user-{number}"}, totals) for number in range(MAX_MERGED_GROUPS)]
    days = [SpendGroup({"day": "2026-03-01", **one.group}, one.totals) for one in groups]
    for number in range(2):
        merged.add(SpendReport(NOW, NOW + DAY, totals, groups, truncated=False))
        by_day.add(SpendReport(NOW, NOW + DAY, totals, days, truncated=bool(number)))
    assert all(one.totals.requests == 2 for one in merged.report().data)
    later = SpendGroup({"day": "2026-03-02", "end_user": "a"}, totals)
    by_day.add(SpendReport(NOW, NOW + DAY, totals, [later], truncated=False))
    assert {(one.group["day"], one.totals.requests) for one in by_day.report().data} == {("2026-03-01", 2)}
    assert by_day.report().truncated
    one_more = SpendGroup({"end_user": "one more"}, totals)
    with pytest.raises(BadRequest, match="ask for a shorter time"):
        merged.add(SpendReport(NOW, NOW + DAY, totals, [one_more], truncated=False))


async def test_spend_is_filtered_by_everything_that_it_is_grouped_by(spent: Database, admin: Admin, demo: Demo) -> None:
    span = SPANS[1]
    filters = {
        "tenant": {"tenant_id": demo.tenant_id}, "project": {"project_id": "prj_1"}, "key": {"key_id": "key_2"},
        "model": {"model": "m0"}, "service_class": {"service_class": "batch"}, "end_user": {"end_user": "user-1"},
        "tag:team": {"tag": "team=ads"},
    }  # fmt: skip
    for grouping, given_filter in filters.items():
        groups = (await admin.call("GET", "spend", 200, params=in_query(*span, group_by=grouping)))["data"]
        (wanted,) = given_filter.values()
        only = await admin.call("GET", "spend", 200, params=in_query(*span, **given_filter))
        (same,) = [one for one in groups if wanted.removeprefix("team=") in one["group"].values()]
        assert only["total"] == same["totals"]
        month = await admin.call("GET", "spend/forecast", 200, params=given_filter)
        assert month["spent_nanodollars"] == same["totals"]["cost_nanodollars"], "the month so far is the whole month"
    assert await billed(spent, *span) == (await admin.call("GET", "spend/forecast", 200))["spent_nanodollars"]


async def test_the_forecast_adds_the_mean_of_the_last_days_for_the_rest_of_the_month(
    spent: Database, admin: Admin
) -> None:
    found = await admin.call("GET", "spend/forecast", 200)
    assert (found["month_start"], found["month_end"]) == ("2026-03-01T00:00:00Z", "2026-04-01T00:00:00Z")
    assert found["rate_since"] == "2026-03-13T00:00:00Z"
    last = await billed(spent, datetime(2026, 3, 13, tzinfo=UTC), NOW)
    assert found["rate_nanodollars_per_day"] == last * 24 // (7 * 24 + 6)
    rest = found["rate_nanodollars_per_day"] * (11 * 24 + 18) // 24
    assert found["forecast_nanodollars"] == found["spent_nanodollars"] + rest
    assert sum(day["cost_nanodollars"] for day in found["days"]) == found["spent_nanodollars"]
    assert found["days"][0]["day"] == "2026-03-01T00:00:00Z"
    nobody = await admin.call("GET", "spend/forecast", 200, params={"tenant_id": "ten_none"})
    assert (nobody["forecast_nanodollars"], nobody["rate_since"], nobody["days"]) == (0, None, [])


DAYS = st.dictionaries(st.integers(-60, 0), st.integers(0, 10**15), max_size=40)


@given(DAYS, st.integers(0, 365 * 24 * 3600))
def test_a_forecast_is_never_below_the_spend_and_ends_at_it(days: dict[int, int], after_s: int) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=after_s)
    today = now.replace(hour=0, minute=0, second=0)
    spend = {today + number * DAY: amount for number, amount in days.items() if today + number * DAY >= read_since(now)}
    found = forecast_month(spend, now)
    assert found.total >= found.spent == sum(amount for day, amount in spend.items() if day >= found.start)
    assert found.start <= now < found.end
    assert found.rate.since is None or now - found.rate.since <= RATE_SPAN + DAY
    recent = sum(amount for day, amount in spend.items() if day >= today - RATE_SPAN)
    assert found.rate.spend_in(8 * DAY) <= 8 * recent, "no more than if all came in a day"
    assert found.rate.spend_in(-DAY) == 0


def test_the_rate_of_who_began_lately_is_the_mean_since_then() -> None:
    today = datetime(2026, 3, 20, tzinfo=UTC)
    now = today + timedelta(hours=12)
    assert rate_of({today: 600}, now).nanodollars_per_day == 600, "of a whole day at least"
    assert rate_of({today - DAY: 300, today: 300}, now).nanodollars_per_day == 400
    assert rate_of({today - 20 * DAY: 1, today: 7500}, now).nanodollars_per_day == 1000
    assert rate_of({today - 29 * DAY: 10**9}, now).since is None
    left = rate_of({today: 600}, now)
    assert left.time_for(300) == timedelta(hours=12) and left.time_for(-5) == timedelta()
    assert left.time_for(600 * 400) is None and rate_of({}, now).time_for(1) is None


async def test_budgets_burn_down_by_the_spend_of_their_scope(
    spent: Database, admin: Admin, demo: Demo, clock: ManualClock
) -> None:
    async with spent.write() as session:
        key, _ = await create_key(session, NewKey(name="other", project_id=demo.project_id), PEPPER, clock.now())
        later, _ = await rotate_key(session, key.id, 0, PEPPER, clock.now())
        month = NewQuota(LimitLevel.TENANT, demo.tenant_id, LimitKind.MONEY_PER_MONTH, 10**7)
        day = NewQuota(LimitLevel.KEY, later.id, LimitKind.MONEY_PER_DAY, 1000)
        tokens = NewQuota(LimitLevel.TENANT, demo.tenant_id, LimitKind.TOKENS_PER_DAY, 5)
        made_at = [clock.now() + timedelta(seconds=number) for number in range(3)]  # the order of the list
        quotas = [await set_quota(session, new, at) for new, at in zip((month, day, tokens), made_at, strict=True)]
        session.add(QuotaWindow(quota_id=quotas[0].id, start=SPANS[1][0], granted=4000, settled=4000))
        rows = [
            make_row(f"k{number}", tenant_id=demo.tenant_id, project_id=demo.project_id, cost_nanodollars=100,
                     key_id=(key.id, later.id)[number % 2], started_at=NOW - timedelta(hours=number, minutes=5))
            for number in range(4)
        ]  # fmt: skip
        await insert_rows(session, rows)
    budgets = (await admin.call("GET", "spend/budgets", 200))["data"]
    assert [one["quota_id"] for one in budgets] == [quotas[0].id, quotas[1].id], "a limit on tokens is no budget"
    of_tenant = budgets[0]
    of_month = await admin.call("GET", "spend/forecast", 200, params={"tenant_id": demo.tenant_id})
    assert of_tenant["spent_nanodollars"] == of_month["spent_nanodollars"]
    assert of_tenant["used_nanodollars"] == 4000, "which the limit has counted"
    assert of_tenant["rate_nanodollars_per_day"] == of_month["rate_nanodollars_per_day"]
    assert of_tenant["burn_down"][0] == {"at": "2026-03-01T00:00:00Z", "remaining_nanodollars": 10**7}
    last = of_tenant["burn_down"][-1]
    assert last == {"at": "2026-03-20T06:00:00Z", "remaining_nanodollars": 10**7 - of_tenant["spent_nanodollars"]}
    of_key = budgets[1]
    assert of_key["scope_id"] == key.id and of_key["spent_nanodollars"] == 400, "of the key and of its successor"
    assert [one["remaining_nanodollars"] for one in of_key["burn_down"]] == [1000, 900, 800, 700, 600]
    assert [one["at"][11:13] for one in of_key["burn_down"]] == ["00", "03", "04", "05", "06"]
    assert of_key["exhausted_at"] is None and of_key["window_end"] == "2026-03-21T00:00:00Z"
    assert await names_of_budgets(admin, tenant_id="ten_b") == []
    assert await names_of_budgets(admin, tenant_id=demo.tenant_id) == [quotas[0].id, quotas[1].id]


async def names_of_budgets(admin: Admin, **params: str) -> list[str]:
    found = (await admin.call("GET", "spend/budgets", 200, params=params))["data"]
    return [one["quota_id"] for one in found]


async def test_a_budget_that_will_not_last_says_until_when(
    database: Database, admin: Admin, demo: Demo, clock: ManualClock
) -> None:
    clock.advance((NOW - clock.now()).total_seconds())
    async with database.write() as session:
        new = NewQuota(LimitLevel.TENANT, demo.tenant_id, LimitKind.MONEY_PER_MONTH, 900)
        quota = await set_quota(session, new, clock.now())
        session.add(QuotaWindow(quota_id=quota.id, start=SPANS[1][0], granted=300, settled=300))
        row: Any = make_row("r", tenant_id=demo.tenant_id, started_at=NOW, cost_nanodollars=300)
        await insert_rows(session, [row])
    clock.advance(1)
    (budget,) = (await admin.call("GET", "spend/budgets", 200))["data"]
    assert budget["rate_nanodollars_per_day"] == 300
    assert budget["exhausted_at"] == "2026-03-22T06:00:01Z", "600 are left, for two days"
    assert budget["forecast_nanodollars"] == 300 + 300 * (11 * 86400 + 18 * 3600 - 1) // 86400
