"""End users and tags in usage: bounded, summed and filtered from the rows, on both databases."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select, text
from tests.usage_rows import make_row

from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest
from moiety_platform.openapi.tags_header import MAX_TAG_NAME_CHARS, MAX_TAG_VALUE_CHARS, MAX_TAGS
from moiety_platform.usage.attribution import (
    MAX_END_USER_CHARS,
    UNATTRIBUTED,
    attribution_of,
    parse_tags,
    stable_user_id,
    tags_of,
)
from moiety_platform.usage.models import UsageRecord
from moiety_platform.usage.queries import UsageFilter
from moiety_platform.usage.store import insert_rows

from .conftest import Admin, Demo

METADATA = st.dictionaries(st.text(max_size=64), st.text(max_size=512), max_size=16)


@given(st.none() | st.text(), METADATA)
def test_attribution_values_are_stored_within_bounds(end_user: str | None, metadata: dict[str, str]) -> None:
    found = attribution_of(end_user, metadata, b"team=search")
    stored = found.end_user or ""
    assert len(stored) <= MAX_END_USER_CHARS and stored.isprintable()
    tags = tags_of(found.tags)
    assert tags["team"] == "search" and list(tags) == sorted(tags) and len(tags) <= MAX_TAGS
    assert all(len(name) <= MAX_TAG_NAME_CHARS and 0 < len(tags[name]) <= MAX_TAG_VALUE_CHARS for name in tags)
    assert all(metadata[name] == value for name, value in tags.items() if name != "team")


def test_long_end_users_stay_apart() -> None:
    first, second = ("x" * MAX_END_USER_CHARS + last for last in "ab")
    names = {attribution_of(name, {}, None).end_user for name in (first, second, first)}
    assert len(names) == 2
    assert attribution_of("x" * MAX_END_USER_CHARS, {}, None).end_user == "x" * MAX_END_USER_CHARS
    assert attribution_of("", {}, None) == UNATTRIBUTED == attribution_of(None, {}, None)


def test_a_header_names_tags_and_one_that_does_not_is_refused() -> None:
    assert parse_tags("team=search,  feature=chat\t, a=b=c") == {"team": "search", "feature": "chat", "a": "b=c"}
    assert parse_tags("d.e-f_0=x-y,a=1,a=2") == {"d.e-f_0": "x-y", "a": "2"}
    for wrong in (
        "", "team", "team=", "=search", "te am=x", "-a=b", "a=b,", "a=\x01", "a=\xe9", "x" * 33 + "=1", "a=" + "x" * 65,
        ",".join(f"t{n}=1" for n in range(MAX_TAGS + 1)), "a=b," * 5000, "a=b\n",
    ):  # fmt: skip
        with pytest.raises(BadRequest, match="x-moiety-tags"):
            parse_tags(wrong)


def test_a_coding_agents_sessions_are_one_end_user() -> None:
    ids = [{"device_id": "d1", "account_uuid": a, "session_id": s} for a in ("", "u1") for s in "xy"]
    sessions = [msgspec.json.encode(one).decode() for one in ids]
    assert [stable_user_id(one) for one in sessions] == ["d1", "d1", "u1", "u1"]
    assert stable_user_id("user_ab12_account_c3_session_9f") == stable_user_id("user_ab12_account_c3_session_77")
    for plain in ("user-1", "{not json", "{}", "[" * 500, '{"device_id":5}', "user_1_session_2"):
        assert stable_user_id(plain) == plain


@pytest.fixture
async def attributed(database: Database, demo: Demo, clock: ManualClock) -> None:
    """Eight requests: of two end users and none, with tags and without, over two hours."""
    whose: dict[str, Any] = {"tenant_id": demo.tenant_id, "project_id": demo.project_id, "key_id": demo.key_id}
    rows = []
    for number in range(8):
        end_user = ("ann", "bob", "ann", None)[number % 4]
        tags = attribution_of(None, {}, (b"team=search, feature=chat", b"team=ads", None, None)[number % 4]).tags
        started_at = clock.now() - timedelta(minutes=90 if number < 4 else 10)
        row = make_row(f"r{number}", **whose, model="m", started_at=started_at)
        rows.append(msgspec.structs.replace(row, end_user=end_user, tags=tags))
    async with database.write() as session:
        await insert_rows(session, rows)


async def sums(admin: Admin, **params: str) -> dict[Any, int]:
    found = (await admin.call("GET", "usage", 200, params=params))["data"]
    return {tuple(one["group"].values()): one["totals"]["requests"] for one in found}


@pytest.mark.usefixtures("attributed")
async def test_usage_is_summed_by_end_user_and_by_tag(admin: Admin) -> None:
    assert await sums(admin, group_by="end_user") == {("ann",): 4, ("bob",): 2, (None,): 2}
    assert await sums(admin, group_by="tag:team") == {("search",): 2, ("ads",): 2, (None,): 4}
    assert await sums(admin, group_by="tag:nobody") == {(None,): 8}
    assert await sums(admin, group_by="model,end_user,tag:feature", end_user="ann") == {
        ("m", "ann", "chat"): 2,
        ("m", "ann", None): 2,
    }
    assert await sums(admin, group_by="hour,tag:team", tag="team=ads") == {
        ("2025-12-31T22:00:00Z", "ads"): 1,
        ("2025-12-31T23:00:00Z", "ads"): 1,
    }
    assert await sums(admin, tag="team=search", end_user="ann") == {(): 2}
    assert await sums(admin, end_user="nobody") == {(): 0}
    assert await sums(admin) == {(): 8}, "sums of hours are the same rows"


@pytest.mark.usefixtures("attributed")
async def test_single_requests_are_listed_by_end_user_and_tag(admin: Admin) -> None:
    async def ids(**params: str) -> list[str]:
        return [one["request_id"] for one in (await admin.call("GET", "usage/requests", 200, params=params))["data"]]

    assert sorted(await ids(end_user="bob")) == ["r1", "r5"]
    assert sorted(await ids(tag="feature=chat")) == ["r0", "r4"]
    assert await ids(tag="feature=other") == []
    shown = (await admin.call("GET", "usage/requests", 200, params={"end_user": "ann", "tag": "team=search"}))["data"]
    assert shown[0]["end_user"] == "ann"
    assert shown[0]["tags"] == {"feature": "chat", "team": "search"}


async def test_unsupported_attribution_reports_are_refused(admin: Admin) -> None:
    for query in (
        "group_by=tag:", "group_by=tag:a%20b", "group_by=tag:a,tag:a", "tag=team", "tag==x", "tag=a%3D%00",
        "group_by=end_user&since=2025-01-01T00:00:00Z", "tag=a%3Db&since=2025-01-01T00:00:00Z",
    ):  # fmt: skip
        await admin.call("GET", f"usage?{query}", 400)
    await admin.call("GET", "usage?since=2020-01-01T00:00:00Z", 200)
    await admin.call("GET", "usage?group_by=end_user&since=2025-12-02T00:00:00Z", 200)


@pytest.mark.usefixtures("attributed")
async def test_rows_of_an_end_user_are_found_by_their_index(database: Database, demo: Demo) -> None:
    wanted = UsageFilter(datetime.min, datetime.max, tenant_id="t", end_user="ann")
    dialect = database.engine.dialect
    rows = select(UsageRecord.request_id).where(*wanted.row_conditions(dialect.name))
    statement = rows.compile(dialect=dialect, compile_kwargs={"literal_binds": True})
    async with database.read() as session:
        if database.engine.dialect.name == "sqlite":
            plan = (await session.execute(text(f"EXPLAIN QUERY PLAN {statement}"))).all()
        else:
            await session.execute(text("SET LOCAL enable_seqscan = off"))
            plan = (await session.execute(text(f"EXPLAIN {statement}"))).all()
    assert "ix_usage_end_user" in str(plan)
