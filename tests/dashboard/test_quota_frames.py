"""Quotas as frames and words: how long they last, and what a new cap would do."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from moiety_dashboard.frames import limits
from moiety_dashboard.views.quotas import different_records

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def quota(kind: str = "tokens_per_day", **changed: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "id": "q",
        "level": "tenant",
        "scope_id": "t",
        "kind": kind,
        "cap": 1000,
        "used": 400,
        "reserved": 0,
    }
    return usual | {"resets_at": "2026-01-02T00:00:00Z"} | changed


def test_a_quota_lasts_as_long_as_the_recent_usage_rate_allows() -> None:
    pace = limits.UsageRate(seconds=3600, requests=10, tokens=100, nanodollars=0)
    frame = limits.quotas_frame([quota()], {"t": "acme"}, {"t": pace}, NOON)
    assert (frame["scope"][0], frame["share"][0], frame["lasts"][0]) == ("tenant acme", 0.4, "6 h 0 min")
    slow = limits.quotas_frame([quota()], {}, {"t": limits.UsageRate(3600, tokens=10)}, NOON)
    assert slow["lasts"][0] == "after its reset"
    assert limits.quotas_frame([quota(used=1000)], {}, {"t": pace}, NOON)["lasts"][0] == "exhausted"
    assert limits.quotas_frame([quota(used=1200)], {}, {"t": pace}, NOON)["share"][0] == 1.2, "as on the page of spend"
    endless = quota(cap=10**18)  # it lasts for more years than a date has
    assert (
        limits.quotas_frame([endless], {}, {"t": limits.UsageRate(3600, tokens=1)}, NOON)["lasts"][0]
        == "after its reset"
    )
    told = limits.preview("tokens_per_day", 10**18, endless, limits.UsageRate(3600, tokens=1), NOON)
    assert told[-1].endswith("lasts until its reset.")


def test_the_quotas_of_a_rotated_key_are_those_of_its_newest_successor() -> None:
    chain = {"a": "b", "b": "c", "c": None, "d": None}
    keys = [{"id": key_id, "replaced_by": successor} for key_id, successor in chain.items()]
    assert limits.newest_keys(keys) == {"a": "c", "b": "c"}
    assert limits.newest_keys([]) == {}


def test_successors_are_found_in_one_pass_over_many_keys() -> None:
    """A deployment that rotates its keys has tens of thousands of old ones, and each page reads the names of all."""
    number = 50_000
    chain = [{"id": f"a{n}", "replaced_by": f"a{n + 1}"} for n in range(number)]
    pairs = [{"id": f"b{n}", "replaced_by": f"c{n}"} for n in range(number)]
    found = limits.newest_keys([*chain, *pairs])
    assert set(map(found.get, (one["id"] for one in chain))) == {f"a{number}"}
    assert all(found[f"b{n}"] == f"c{n}" for n in range(number))


def test_a_quota_has_its_currency_once() -> None:
    assert limits.in_words(quota("money_per_month", cap=20 * 10**9)) == "$20.00 per month"
    assert limits.in_words(quota("tokens_per_day", cap=8_000_000)) == "8.0 M tokens per day"


def test_a_quota_is_exhausted_where_a_usual_request_does_not_fit_and_not_only_at_its_last_token() -> None:
    pace = limits.UsageRate(seconds=3600, requests=10, tokens=1000)
    left = {901: True, 900: False, 1000: True, 999: True, 0: False}  # used, of 1000; a request has 100 tokens
    for used, is_exhausted in left.items():
        frame = limits.quotas_frame([quota(used=used)], {}, {"t": pace}, NOON)
        assert (bool(frame["exhausted"][0]), frame["lasts"][0] == "exhausted") == (is_exhausted, is_exhausted), used
    assert not limits.quotas_frame([quota(used=999)], {}, {}, NOON)["exhausted"][0]  # the size of a request is unknown
    told = limits.preview("tokens_per_day", 1000, quota(used=999), pace, NOON)
    assert "already exhausted" in told[-1]


@pytest.mark.parametrize(
    ("kind", "amount"),
    [("requests_per_minute", 1), ("concurrent_requests", 1), ("tokens_per_day", 50), ("money_per_month", 7)],
)
def test_the_amount_of_a_usual_request_is_in_the_unit_of_the_quota(kind: str, amount: float) -> None:
    assert limits.UsageRate(3600, requests=2, tokens=100, nanodollars=14).per_request(kind) == amount
    assert limits.UsageRate(3600).per_request(kind) == 1


def test_a_new_cap_says_beforehand_what_it_would_do() -> None:
    pace = limits.UsageRate(seconds=3600, requests=600, tokens=100)
    told = " ".join(limits.preview("tokens_per_day", 800, quota(), pace, NOON))
    assert "Changes from 1,000 to 800" in told
    assert "50.0 % of the cap" in told
    assert "exhausted in 4 h 0 min" in told
    spent = " ".join(limits.preview("tokens_per_day", 100, quota(), pace, NOON))
    assert "already exhausted" in spent
    assert "until 2026-01-02 00:00 UTC" in spent
    assert "would be rejected" in " ".join(limits.preview("requests_per_minute", 5, None, pace, NOON))
    counts = limits.preview("token_counts_per_minute", 600, None, pace, NOON)
    assert counts[1:] == ["Requests that count tokens are not part of the recorded usage."]
    none = limits.preview("token_counts_per_minute", 0, None, pace, NOON)
    assert none[1:] == ["**All requests that count tokens are rejected** with 429."]
    assert "All requests are rejected" in " ".join(limits.preview("tokens_per_day", 0, None, pace, NOON))


def test_records_that_do_not_agree_have_the_name_of_their_tenant() -> None:
    books = {"requests": 4, "hours": 5, "ledger": 5}
    days = [{"tenant_id": "ten_gone", "days": 3, "hours": 4}]
    found = {"differences": [{"tenant_id": "ten_a", **books}], "days": days, "windows": []}
    assert [(one["record"], one["found"], one["expected"]) for one in different_records(found, {"ten_a": "acme"})] == [
        ("requests of acme", "4", "5"), ("days of ten_gone", "3", "4"),
    ]  # fmt: skip
