"""Tenants, their usage and their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import ratio, show_time

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
    return frame.sort_values(["output_tokens", "tenant"], ascending=[False, True], ignore_index=True)


def attainment_of(totals: Mapping[str, Any]) -> float | None:
    """Return the SLO attainment of minute or hour sums."""
    if "num_slo_requests" in totals:
        return ratio(totals["num_slo_attained"], totals["num_slo_requests"])
    found: float | None = totals.get("attainment")
    return found


def keys_frame(keys: Rows, projects: Rows, zone: tzinfo) -> pd.DataFrame:
    """Return one row per key, by its last four characters, with times in that zone; working keys come first."""
    names = {project["id"]: project["name"] for project in projects}
    rows = [
        {
            "key": f"…{key['hint']}",
            "name": key["name"],
            "for": names.get(key["project_id"], "–") if key["project_id"] else f"administration ({key['role']})",
            "status": key["status"],
            "models": ", ".join(key["allowed_models"] or []) or "all",
            "created": show_time(key["created_at"], zone),
            "expires": show_time(key["expires_at"], zone) or "never",
            "id": key["id"],
        }
        for key in keys
    ]
    frame = pd.DataFrame(rows, columns=["key", "name", "for", "status", "models", "created", "expires", "id"])
    return frame.sort_values("status", kind="stable", ignore_index=True)
