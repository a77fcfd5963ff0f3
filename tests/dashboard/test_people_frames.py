"""Frames of users, of their keys and of their projects."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import pandas as pd

from moiety_dashboard.frames.tenants import keys_frame, own_projects_frame, project_days_frame, users_frame
from moiety_platform.auth.users.admin_resource import plain


def test_keys_are_shown_with_their_user_last_use_spend_and_quotas() -> None:
    key: dict[str, Any] = {
        "id": "k", "hint": "wxyz", "name": "ci", "status": "active", "created_at": "2026-01-01T10:00:00Z",
        "expires_at": None, "allowed_models": ["m"], "role": None, "project_id": "p", "scopes": ["inference"],
        "user_id": "u"}  # fmt: skip
    details = {"last_used_at": "2026-01-02T10:00:00Z", "month_requests": 2, "month_cost_nanodollars": 1_500_000_000,
               "limits": {"tokens_per_day": 1000, "money_per_month": 2_000_000_000}}  # fmt: skip
    unused = details | {"last_used_at": None, "limits": {}}
    keys = [key | {"details": details}, key | {"details": unused}, key | {"details": None}]
    first, second, third = keys_frame(keys, [], UTC, [{"id": "u", "email": "ada@example.com"}]).to_dict("records")
    assert (first["user"], first["last_used"], first["spend"]) == ("ada@example.com", "2026-01-02 10:00", 1.5)
    assert first["limits"] == "1,000 tokens per day, $2.00 per month"
    assert (second["last_used"], second["limits"]) == ("never", "none")
    assert pd.isna(third["last_used"])


def test_users_are_shown_with_the_names_of_tenants_and_projects() -> None:
    usual: dict[str, Any] = {
             "id": "u", "email": "ada@example.com", "name": "Ada", "role": "developer", "tenant_id": "t",
             "project_ids": ["p", "q"], "state": "invited", "created_at": "2026-01-01T10:00:00Z",
             "accepted_at": None, "invitation_expires_at": "2026-01-04T10:00:00Z"}  # fmt: skip
    of_all = usual | {"tenant_id": None, "project_ids": None}
    frame = users_frame([usual, of_all], {"t": "acme", "p": "web"}, UTC)
    assert list(frame["tenant"]) == ["acme", "all tenants"]
    assert list(frame["projects"]) == ["web, q", "all"]
    assert list(frame["invitation"]) == ["2026-01-04 10:00"] * 2


def test_projects_without_usage_this_month_are_shown_too() -> None:
    month = {"requests": 3, "rejected": 1, "prompt_tokens": 10, "output_tokens": 5, "cost_nanodollars": 2_000_000_000}
    frame = own_projects_frame([{"name": "web", "month": month}, {"name": "new", "month": None}])
    assert list(frame["tokens"]) == [15, 0]
    assert list(frame["cost"]) == [2.0, 0.0]


def test_usage_of_projects_by_day_has_their_names() -> None:
    totals = {"prompt_tokens": 3, "output_tokens": 4, "cost_nanodollars": 5_000_000_000}
    group = {"day": "2026-01-31", "project_id": "p", "project_name": "web"}
    frame = project_days_frame([{"group": group, "totals": totals}])
    assert (frame["name"][0], frame["tokens"][0], frame["cost"][0]) == ("web", 7, 5.0)
    assert frame["slot"][0].isoformat() == "2026-01-31T00:00:00+00:00"


def test_a_developer_whose_group_no_longer_gives_the_role_is_shown_as_such() -> None:
    user = {"email": "a@b.example", "name": None, "role": "developer", "tenant_id": None, "project_ids": None,
            "id": "u", "state": "active", "created_at": None, "accepted_at": None,
            "invitation_expires_at": None}  # fmt: skip
    ended = {**user, "role_ended_at": "2026-01-01T10:00:00Z"}
    shown = users_frame([user, ended, {**ended, "state": "disabled"}], {}, UTC)
    assert list(shown["state"]) == ["active", "role ended", "disabled"]
    rows = [plain({"role_ended_at": None, **one}) for one in (user, ended)]
    assert [row["state"] for row in rows] == ["active", "role ended"]
