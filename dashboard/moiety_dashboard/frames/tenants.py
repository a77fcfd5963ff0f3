"""Tenants, their usage and their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, tzinfo
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import ratio, show_time
from moiety_dashboard.frames.limits import KINDS, amount

Rows = Sequence[Mapping[str, Any]]

COLUMNS = (
    *("tenant", "class", "weight", "status", "share", "entitled", "requests", "failed", "rejected"),
    *("prompt_tokens", "output_tokens", "attainment", "ttft_ms", "cost_nanodollars"),
)


def tenants_frame(tenants: Rows, usage: Rows) -> pd.DataFrame:
    """Return one row per tenant with its usage, the busiest first; `usage` are sums by tenant.

    `share` is of all tokens. `entitled` is the tenant's weight over the weights of all tenants with usage.
    """
    used = {group["group"]["tenant_id"]: group["totals"] for group in usage}
    tokens = {name: totals["prompt_tokens"] + totals["output_tokens"] for name, totals in used.items()}
    all_tokens = sum(tokens.values())
    weights = sum(tenant["weight"] for tenant in tenants if tokens.get(tenant["id"]))
    rows = []
    for tenant in tenants:
        totals = used.get(tenant["id"], {})
        busy = bool(tokens.get(tenant["id"]))
        rows.append(
            {
                "tenant": tenant["name"],
                "class": tenant["service_class"],
                "weight": tenant["weight"],
                "status": tenant["status"],
                "share": ratio(tokens.get(tenant["id"], 0), all_tokens),
                "entitled": tenant["weight"] / weights if busy else None,
                "attainment": attainment_of(totals),
                "ttft_ms": totals.get("mean_ttft_ms"),
                "cost_nanodollars": totals.get("cost_nanodollars"),
                **{name: totals.get(name, 0) for name in ("requests", "failed", "rejected")},
                **{name: totals.get(name, 0) for name in ("prompt_tokens", "output_tokens")},
            }
        )
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.sort_values(["share", "requests", "tenant"], ascending=[False, False, True], ignore_index=True)


def attainment_of(totals: Mapping[str, Any]) -> float | None:
    """Return the SLO attainment of minute or hour sums."""
    if "num_slo_requests" in totals:
        return ratio(totals["num_slo_attained"], totals["num_slo_requests"])
    found: float | None = totals.get("attainment")
    return found


KEY_COLUMNS = (
    *("key", "name", "for", "user", "status", "models", "scopes", "limits", "last_used", "spend", "expires", "created"),
    "id",
)


def keys_frame(keys: Rows, projects: Rows, zone: tzinfo, users: Rows = ()) -> pd.DataFrame:
    """Return one row per key, by its last four characters, with times in that zone; working keys come first.

    `spend` is in dollars, of this month. Keys without details have neither spend nor last use.
    """
    names = {project["id"]: project["name"] for project in projects}
    emails = {user["id"]: user["email"] for user in users}
    rows = [
        {
            "key": f"…{key['hint']}",
            "name": key["name"],
            "for": names.get(key["project_id"], "–") if key["project_id"] else f"administration ({key['role']})",
            "user": None if key["user_id"] is None else emails.get(key["user_id"], key["user_id"]),
            "status": key["status"],
            "models": ", ".join(key["allowed_models"] or []) or "all",
            "scopes": ", ".join(key["scopes"]),
            "created": show_time(key["created_at"], zone),
            "expires": show_time(key["expires_at"], zone) or "never",
            "id": key["id"],
            **_details(key["details"], zone),
        }
        for key in keys
    ]
    frame = pd.DataFrame(rows, columns=list(KEY_COLUMNS))
    return frame.sort_values("status", kind="stable", ignore_index=True)


def _details(details: Mapping[str, Any] | None, zone: tzinfo) -> dict[str, Any]:
    if details is None:
        return {"limits": None, "last_used": None, "spend": None}
    return {
        "limits": limits_text(details["limits"]) or "none",
        "last_used": show_time(details["last_used_at"], zone) or "never",
        "spend": details["month_cost_nanodollars"] / 1e9,
    }


def limits_text(caps: Mapping[str, int]) -> str:
    """Return caps of quotas by kind as text."""
    return ", ".join(
        f"{amount(kind, cap)} {KINDS.get(kind, kind).removeprefix('dollars ')}" for kind, cap in caps.items()
    )


USER_COLUMNS = ("email", "name", "role", "tenant", "projects", "state", "accepted", "invitation", "created", "id")


def users_frame(users: Rows, names: Mapping[str, str], zone: tzinfo) -> pd.DataFrame:
    """Return one row per user, with times in that zone; `names` are those of tenants and projects by id."""
    rows = [
        {
            "email": user["email"],
            "name": user["name"] or None,
            "role": user["role"],
            "tenant": "all tenants" if user["tenant_id"] is None else names.get(user["tenant_id"], user["tenant_id"]),
            "projects": ", ".join(names.get(one, one) for one in user["project_ids"] or []) or "all",
            "state": "role ended" if user["state"] == "active" and user.get("role_ended_at") else user["state"],
            "accepted": show_time(user["accepted_at"], zone),
            "invitation": show_time(user["invitation_expires_at"], zone),
            "created": show_time(user["created_at"], zone),
            "id": user["id"],
        }
        for user in users
    ]
    return pd.DataFrame(rows, columns=list(USER_COLUMNS))


PROJECT_COLUMNS = ("project", "requests", "rejected", "tokens", "cost")


def own_projects_frame(projects: Rows) -> pd.DataFrame:
    """Return one row per project of the user, with its usage of this month; the cost is in dollars."""
    rows = []
    for project in projects:
        month = project["month"] or {}
        tokens = month.get("prompt_tokens", 0) + month.get("output_tokens", 0)
        cost = month.get("cost_nanodollars", 0) / 1e9
        counts = {name: month.get(name, 0) for name in ("requests", "rejected")}
        rows.append({"project": project["name"], **counts, "tokens": tokens, "cost": cost})
    return pd.DataFrame(rows, columns=list(PROJECT_COLUMNS))


def project_days_frame(groups: Rows) -> pd.DataFrame:
    """Return tokens and cost in dollars per day and project, from sums by project and day."""
    rows = [
        {
            "slot": datetime.fromisoformat(f"{group['group']['day']}T00:00:00+00:00"),
            "name": group["group"]["project_name"] or group["group"]["project_id"],
            "tokens": group["totals"]["prompt_tokens"] + group["totals"]["output_tokens"],
            "cost": group["totals"]["cost_nanodollars"] / 1e9,
        }
        for group in groups
    ]
    return pd.DataFrame(rows, columns=["slot", "name", "tokens", "cost"])
