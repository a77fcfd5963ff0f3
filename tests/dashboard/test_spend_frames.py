"""Answers about spend and about logged requests as frames, from answers written by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from moiety_dashboard.frames.requests import requests_frame
from moiety_dashboard.frames.spend import PREDICTED, REMAINING, budgets_frame, burn_frame, days_frame, spend_frame
from moiety_dashboard.views.spend import DAY, LAST_MONTH, MONTH, OTHER, between, days_of, with_rest

NOW = datetime(2026, 3, 20, 6, tzinfo=UTC)
TODAY = datetime(2026, 3, 20, tzinfo=UTC)


def totals(cost: int, **changed: int) -> dict[str, int]:
    return {
        "requests": 2, "prompt_tokens": 5, "cached_tokens": 1, "output_tokens": 7, "speculative_tokens": 0,
        "cost_before_credits_nanodollars": cost, "credit_nanodollars": 0, "cost_nanodollars": cost,
    } | changed  # fmt: skip


def test_spend_has_the_largest_cost_first_with_its_share_and_name() -> None:
    groups: list[dict[str, Any]] = [
        {"group": {"tenant_id": "ten_a", "tenant_name": "acme"}, "totals": totals(10**9)},
        {"group": {"tenant_id": "ten_gone", "tenant_name": None}, "totals": totals(3 * 10**9, requests=9)},
    ]
    frame = spend_frame(groups, "tenant_id", 4 * 10**9, {"ten_a": "acme"})
    assert list(frame["name"]) == ["ten_gone", "acme"] and list(frame["id"]) == ["ten_gone", "ten_a"]
    assert list(frame["share"]) == [0.75, 0.25] and list(frame["cost"]) == [3.0, 1.0]
    assert list(frame["requests"]) == [9, 2] and list(frame["output_tokens"]) == [7, 7]
    free = spend_frame([{"group": {"end_user": None}, "totals": totals(0)}], "end_user", 0, {})
    assert free.iloc[0]["name"] is None and free.iloc[0]["share"] is None
    assert spend_frame([], "model", 0, {}).empty


def test_days_of_the_largest_groups_are_completed_by_the_rest() -> None:
    days = days_frame({"acme": [{"group": {"day": "2026-03-19"}, "totals": totals(10**9)}]})
    assert list(days.iloc[0]) == [TODAY - DAY, "acme", 1.0]
    whole = days_frame({
        "others": [
            {"group": {"day": "2026-03-19"}, "totals": totals(10**9)},
            {"group": {"day": "2026-03-20"}, "totals": totals(2 * 10**9)},
        ]
    })  # fmt: skip
    found = with_rest(days, whole)
    assert list(found["name"]) == ["acme", "others"] and list(found["cost"]) == [1.0, 2.0]
    assert list(with_rest(days_frame({}), whole)["cost"]) == [1.0, 2.0]


def test_budgets_burn_down_to_their_window_end_at_their_rate() -> None:
    budget = {
        "quota_id": "quo_a", "level": "tenant", "scope_id": "ten_a", "kind": "money_per_month",
        "cap_nanodollars": 10 * 10**9, "used_nanodollars": 4 * 10**9, "window_start": "2026-03-01T00:00:00Z",
        "window_end": "2026-04-01T00:00:00Z", "spent_nanodollars": 4 * 10**9, "rate_nanodollars_per_day": 10**9,
        "forecast_nanodollars": 15 * 10**9, "exhausted_at": "2026-03-26T06:00:00Z",
        "burn_down": [
            {"at": "2026-03-01T00:00:00Z", "remaining_nanodollars": 10 * 10**9},
            {"at": "2026-03-20T00:00:00Z", "remaining_nanodollars": 6 * 10**9},
        ],
    }  # fmt: skip
    full = budget | {"quota_id": "quo_b", "used_nanodollars": 12 * 10**9, "exhausted_at": "2026-03-20T06:00:00Z"}
    frame = budgets_frame([budget, full], {"ten_a": "acme"}, UTC)
    assert list(frame["quota_id"]) == ["quo_b", "quo_a"] and list(frame["share"]) == [1.2, 0.4]
    assert set(frame["scope"]) == {"tenant acme"} and set(frame["limit"]) == {"dollars per month"}
    assert list(frame["exhausted_at"]) == ["already", "2026-03-26 06:00"], "not the time of the answer"
    burn = burn_frame(budget)
    assert list(burn["name"]) == [REMAINING, REMAINING, PREDICTED, PREDICTED]
    assert list(burn["remaining"]) == [10.0, 6.0, 6.0, -6.0]
    assert burn["slot"].iloc[-1] == datetime(2026, 4, 1, tzinfo=UTC)


def test_windows_are_whole_days_of_utc() -> None:
    assert days_of(MONTH, NOW) == (datetime(2026, 3, 1, tzinfo=UTC), TODAY + DAY)
    assert days_of(LAST_MONTH, NOW) == (datetime(2026, 2, 1, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC))
    assert days_of("7 d", NOW) == (TODAY - 6 * DAY, TODAY + DAY)
    since, until = days_of(OTHER, NOW)
    chosen = (since.date(), (since + 2 * DAY).date())
    assert between(chosen, since, until) == (since, since + 3 * DAY)
    assert between(chosen[:1], since, until) == (since, until), "while the end is not chosen yet"


def test_logged_requests_have_names_costs_and_the_state_of_their_slo() -> None:
    request = {
        "request_id": "r", "tenant_id": "ten_a", "project_id": "prj_a", "key_id": "k", "endpoint": "/v1/completions",
        "model": "m", "route": None, "service_class": "standard", "started_at": "2026-03-20T05:00:00Z",
        "outcome": "failed", "http_status": 500, "error_code": "engine_failed", "prompt_tokens": 5, "cached_tokens": 1,
        "output_tokens": 0, "cost_nanodollars": 2_500_000, "ttft_ms": None, "duration_ms": 12.5, "slo_attained": False,
        "end_user": "ann", "tags": {"team": "ads", "a": "b"}, "has_trace": True,
    }  # fmt: skip
    row = requests_frame([request], {"ten_a": "acme", "k": "acme / web / k …abcd"}).iloc[0]
    assert (row["tenant"], row["key"], row["status_code"], row["error"]) == (
        "acme", "acme / web / k …abcd", 500, "engine_failed",
    )  # fmt: skip
    assert (row["cost"], row["slo"], row["tags"], row["trace"]) == (0.0025, "missed", "team=ads, a=b", True)
    assert row["at"] == NOW - timedelta(hours=1) and row["class"] == "standard"
    plain = requests_frame([request | {"slo_attained": None, "tags": {}}], {}).iloc[0]
    assert plain["slo"] is None and plain["tags"] is None and plain["tenant"] == "ten_a"
    assert requests_frame([], {}).empty


@pytest.mark.parametrize("month", range(1, 13))
def test_the_last_month_ends_where_this_one_begins(month: int) -> None:
    now = datetime(2026, month, 28, 23, tzinfo=UTC)
    since, until = days_of(LAST_MONTH, now)
    assert until == days_of(MONTH, now)[0] and since.day == until.day == 1 and (until - since).days in (28, 30, 31)
