"""Frames of routes and guardrails."""

from __future__ import annotations

from typing import Any

from moiety_dashboard.frames import rules as frames

NO_ROUTE: dict[str, Any] = {
    "fallbacks": [], "sticky": "none", "downgrade_model": None, "downgrade_percent": None, "shadow_model": None,
    "shadow_percent": None,
}  # fmt: skip
CHECK: dict[str, Any] = {
    "name": "g", "stage": "input", "action": "block", "on_failure": "closed", "detectors": [], "url": None,
    "entry_point": None, "timeout_ms": 500, "tenant_id": None,
}  # fmt: skip


def test_targets_have_their_shares_of_the_requests() -> None:
    alias = {"name": "best", "targets": [{"model": "large", "weight": 1}]}
    canary = {"name": "chat", "targets": [{"model": "stable", "weight": 19}, {"model": "next", "weight": 1}]}
    more = {"sticky": "tenant", "fallbacks": ["a", "b"], "downgrade_model": "small", "downgrade_percent": 90}
    shadow = {"shadow_model": "next", "shadow_percent": 0.5}
    frame = frames.routes_frame([NO_ROUTE | alias, NO_ROUTE | canary | more | shadow])
    first, second = frame.to_dict("records")
    assert (first["name"], first["targets"]) == ("best", "large")
    assert frame.iloc[0][["fallbacks", "sticky", "downgrade", "shadow"]].isna().all()
    assert second == {
        "name": "chat", "targets": "stable 95 %, next 5 %", "fallbacks": "a, b", "sticky": "tenant",
        "downgrade": "small at 90 %", "shadow": "next, 0.5 %",
    }  # fmt: skip


def test_a_guardrail_shows_its_check_and_its_tenant() -> None:
    listed = [
        CHECK | {"detectors": ["secrets", "card_numbers"]},
        CHECK | {"url": "https://guard.example.com", "tenant_id": "ten_a"},
        CHECK | {"entry_point": "acme_policy", "tenant_id": "ten_gone"},
    ]
    rows = frames.guardrails_frame(listed, {"ten_a": "acme"}).to_dict("records")
    assert [row["check"] for row in rows] == [
        "secrets, card numbers", "https://guard.example.com", "entry point acme_policy",
    ]  # fmt: skip
    assert [row["tenant"] for row in rows] == ["all", "acme", "ten_gone"]
    assert [row["timeout_ms"] for row in rows][1:] == [500, 500]


def test_without_rows_the_frames_have_their_columns() -> None:
    assert list(frames.routes_frame([])) == list(frames.ROUTE_COLUMNS)
    assert list(frames.guardrails_frame([], {})) == list(frames.GUARDRAIL_COLUMNS)
