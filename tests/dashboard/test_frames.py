"""The admin API's answers as frames, from answers written by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from moiety_dashboard import charts, frames
from moiety_dashboard.settings import read_settings
from moiety_dashboard.views.overview import share, short

LOAD = {
    "num_running": 3, "num_waiting": 1, "num_paused": 0, "kv_blocks_total": 200, "kv_blocks_used": 50,
    "kv_blocks_cached": 20, "prompt_tokens_total": 7, "cached_tokens_total": 2, "output_tokens_total": 9,
}  # fmt: skip
CARD = {"model": "m", "device": "cpu", "dtype": "float32"}
TENANTS = [
    {"id": "t1", "name": "acme", "service_class": "priority", "weight": 2.0, "status": "active"},
    {"id": "t2", "name": "idle", "service_class": "standard", "weight": 1.0, "status": "suspended"},
]


def engine(**changes: Any) -> dict[str, Any]:
    usual = {"address": "ipc://a", "healthy": True, "draining": False, "reason": "", "card": CARD, "load": LOAD}
    return usual | changes


def request(started: str, outcome: str, tokens: int, tenant: str = "t1") -> dict[str, Any]:
    times = {"ttft_ms": 1.0, "duration_ms": 2.0}
    return {
        "started_at": started,
        "tenant_id": tenant,
        "outcome": outcome,
        "prompt_tokens": 1,
        "output_tokens": tokens,
    } | times


def test_an_engine_shows_its_load_as_shares_of_its_memory() -> None:
    row = frames.engines_frame([engine()]).iloc[0]
    assert (row["state"], row["running"], row["kv_used"], row["kv_cached"]) == ("ready", 3, 0.25, 0.1)


def test_an_engine_that_never_reported_is_away_with_its_reason_and_no_figures() -> None:
    row = frames.engines_frame([engine(healthy=False, reason="no answer", card=None, load=None)]).iloc[0]
    assert row["state"] == "away: no answer"
    assert row["kv_used"] is None


def test_tenants_without_usage_are_listed_after_the_busy_ones() -> None:
    totals = {"requests": 4, "failed": 1, "prompt_tokens": 10, "output_tokens": 5, "mean_ttft_ms": 12.5}
    frame = frames.tenants_frame(TENANTS[::-1], [{"group": {"tenant_id": "t1"}, "totals": totals}])
    assert list(frame["tenant"]) == ["acme", "idle"]
    assert list(frame["requests"]) == [4, 0]


def test_keys_are_shown_by_their_owner_and_never_whole() -> None:
    created = "2026-01-01T10:00:00Z"
    key = {
        "id": "secretid",
        "hint": "wxyz",
        "name": "ci",
        "status": "active",
        "created_at": created,
        "expires_at": None,
        "role": None,
        "tenant_id": None,
    }
    owner = {**key, "project_id": None, "role": "owner"}
    projects = [{"id": "p1", "tenant_id": "t1"}]
    keys = [{**key, "project_id": "p1"}, owner, {**owner, "role": "viewer", "tenant_id": "t1"}]
    frame = frames.keys_frame(keys, projects, TENANTS)
    assert list(frame["owner"]) == ["acme", "owner", "viewer of acme"]
    assert set(frame["expires"]) == {"never"}
    assert "secretid" not in frame.to_string()


def test_requests_are_counted_and_summed_by_time_slot() -> None:
    rows = [
        request("2026-01-01T10:00:01Z", "served", 5),
        request("2026-01-01T10:00:14.999Z", "served", 6),
        request("2026-01-01T10:00:15Z", "failed", 7),
    ]
    frame = frames.requests_frame(rows, TENANTS)
    counts = frames.count_by_time(frame, "outcome", None, timedelta(seconds=15))
    assert list(zip(counts["outcome"], counts["amount"], strict=True)) == [("served", 2), ("failed", 1)]
    sums = frames.count_by_time(frame, "tenant", "output_tokens", timedelta(seconds=15))
    assert list(sums["amount"]) == [11, 7]


def test_hours_tell_served_from_broken_requests() -> None:
    totals = {"requests": 10, "failed": 1, "rejected": 2, "disconnected": 3, "output_tokens": 99}
    group = {"hour": "2026-01-01T10:00:00Z", "tenant_id": "t1", "tenant_name": None}
    row = frames.hourly_frame([{"group": group, "totals": totals}]).iloc[0]
    assert (row["served"], row["tenant"], row["output_tokens"]) == (4, "t1", 99)


def test_nothing_at_all_makes_empty_frames_with_their_columns() -> None:
    assert "tenant" in frames.tenants_frame([], []).columns
    assert "owner" in frames.keys_frame([], [], []).columns
    assert "slot" in frames.hourly_frame([]).columns
    assert "started" in frames.requests_frame([], []).columns


def test_a_chart_places_its_bars_in_the_middle_of_their_slots() -> None:
    frame = frames.count_by_time(
        frames.requests_frame([request("2026-01-01T10:00:01Z", "served", 5)], TENANTS),
        "outcome", None, timedelta(seconds=10),
    )  # fmt: skip
    middle = charts.middle_ms(frame["slot"], timedelta(seconds=10))
    assert list(middle) == [datetime(2026, 1, 1, 10, 0, 5, tzinfo=UTC).timestamp() * 1000]
    span = (datetime(2026, 1, 1, 9, 45, tzinfo=UTC), datetime(2026, 1, 1, 10, 0, tzinfo=UTC))
    chart = charts.bars_over_time(frame, "outcome", "requests", span, timedelta(seconds=10)).to_dict()
    assert chart["encoding"]["x"]["scale"]["domain"][0]["minutes"] == 45


def test_settings_come_from_arguments_before_the_environment() -> None:
    environment = {"MOIETY_URL": "http://one:1", "MOIETY_ADMIN_KEY": "mty_a.b"}
    assert read_settings([], environment).gateway_url == "http://one:1"
    settings = read_settings(["--gateway", "http://two:2/"], environment)
    assert (settings.gateway_url, settings.admin_key) == ("http://two:2", "mty_a.b")
    assert "mty_" not in repr(settings)


def test_large_numbers_are_shortened() -> None:
    assert [short(number) for number in (0, 9_999, 12_345, 1_200_000, 3.2e9)] == [
        "0",
        "9,999",
        "12.3 k",
        "1.2 M",
        "3.2 G",
    ]
    assert [share(1, 4), share(0, 0)] == ["25.0%", "0 %"]
