"""Routes and guardrails as frames. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

Rows = Sequence[Mapping[str, Any]]

ROUTE_COLUMNS = ("name", "targets", "fallbacks", "sticky", "downgrade", "shadow")
GUARDRAIL_COLUMNS = ("name", "stage", "action", "check", "timeout_ms", "on_failure", "tenant")
CHECKS = {"secrets": "secrets", "card_numbers": "card numbers"}


def routes_frame(routes: Rows) -> pd.DataFrame:
    """Return one row per route; the share of a target is its weight divided by the sum of weights."""
    rows = [
        {
            "name": one["name"],
            "targets": ", ".join(shares_of(one["targets"])),
            "fallbacks": ", ".join(one["fallbacks"]) or None,
            "sticky": None if one["sticky"] == "none" else one["sticky"],
            "downgrade": one["downgrade_model"] and f"{one['downgrade_model']} at {one['downgrade_percent']} %",
            "shadow": one["shadow_model"] and f"{one['shadow_model']}, {one['shadow_percent']:g} %",
        }
        for one in routes
    ]
    return pd.DataFrame(rows, columns=list(ROUTE_COLUMNS))


def shares_of(targets: Rows) -> list[str]:
    """Return each target with its share of the requests; a single target gets all."""
    if len(targets) == 1:
        return [str(targets[0]["model"])]
    total = sum(one["weight"] for one in targets) or 1
    return [f"{one['model']} {100 * one['weight'] / total:.3g} %" for one in targets]


def guardrails_frame(guardrails: Rows, names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per guardrail. `names` are those of tenants by id."""
    rows = [
        {
            **{name: one[name] for name in ("name", "stage", "action", "on_failure")},
            "check": check_of(one),
            "timeout_ms": None if one["detectors"] else one["timeout_ms"],
            "tenant": "all" if one["tenant_id"] is None else names.get(one["tenant_id"], one["tenant_id"]),
        }
        for one in guardrails
    ]
    return pd.DataFrame(rows, columns=list(GUARDRAIL_COLUMNS))


def check_of(guardrail: Mapping[str, Any]) -> str:
    """Return what checks the text: names of detectors, an address, or an entry point."""
    if guardrail["url"] is not None:
        return str(guardrail["url"])
    if guardrail["entry_point"] is not None:
        return f"entry point {guardrail['entry_point']}"
    return ", ".join(CHECKS.get(one, one) for one in guardrail["detectors"])
