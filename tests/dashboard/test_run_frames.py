"""Agent runs and the requests of one run as frames, from answers written by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pandas as pd

from moiety_dashboard import waterfall
from moiety_dashboard.frames import traces
from moiety_dashboard.frames.runs import run_bars_frame, runs_frame

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
RUN = {
    "name": "task", "tenant_id": "t", "status": "active", "num_requests": 2, "used_tokens": 30,
    "budget_tokens": 120, "used_usd": "0.5", "budget_usd": None, "deadline_at": None,
    "created_at": "2026-01-01T12:00:00Z", "id": "run_a",
}  # fmt: skip


def test_runs_have_the_used_share_of_their_budgets_and_their_requests_are_bars() -> None:
    row = runs_frame([RUN], {"t": "acme"}, NOON).iloc[0]
    assert (row["tenant"], row["token_share"], row["cost"], row["cost_share"]) == ("acme", 0.25, 0.5, None)
    assert runs_frame([], {}, NOON).empty
    usual = {
        "endpoint": "/v1/messages", "model": "m", "error_code": None, "prompt_tokens": 1, "output_tokens": 2,
        "cost_usd": "0", "request_id": "r", "trace_id": "t",
    }  # fmt: skip
    ended = {**usual, "start_ms": 5.0, "duration_ms": 10.0, "outcome": "failed", "error_code": "run_stopped"}
    bars = run_bars_frame([{**usual, "start_ms": 0.0, "duration_ms": None, "outcome": "open"}, ended])
    assert list(bars["end_ms"]) == [0.0, 15.0] and list(bars["label"]) == ["messages m"] * 2
    assert list(bars["who"]) == [traces.GATEWAY, traces.FAILED] and "run_stopped" in bars["attributes"][1]
    assert waterfall.waterfall(bars, pd.DataFrame()).to_dict()


def test_a_run_is_expired_from_its_deadline_on_unless_it_was_stopped() -> None:
    def status_at(now: datetime, **changed: str) -> str:
        return str(runs_frame([RUN | {"deadline_at": "2026-01-01T12:00:00Z"} | changed], {}, now)["status"][0])

    before = NOON - timedelta(seconds=1)
    assert [status_at(before), status_at(NOON), status_at(NOON, status="stopped")] == ["active", "expired", "stopped"]
