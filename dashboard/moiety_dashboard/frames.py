"""From the admin API's JSON to data frames, one a table or chart. Pure; knows no page and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import pandas as pd

Rows = Sequence[Mapping[str, Any]]

OUTCOMES = ("stop", "length", "disconnected", "rejected", "failed")


def engines_frame(engines: Rows) -> pd.DataFrame:
    """A line an engine; figures are missing where it has not reported."""
    rows = []
    for engine in engines:
        card, load = engine["card"] or {}, engine["load"] or {}
        blocks = load.get("kv_blocks_total") or 0
        rows.append(
            {
                "model": card.get("model", "–"),
                "device": " ".join(part for part in (card.get("device"), card.get("dtype")) if part) or "–",
                "state": engine_state(engine),
                "running": load.get("num_running"),
                "waiting": load.get("num_waiting"),
                "paused": load.get("num_paused"),
                "kv_used": load["kv_blocks_used"] / blocks if blocks else None,
                "kv_cached": load["kv_blocks_cached"] / blocks if blocks else None,
                "prompt_tokens": load.get("prompt_tokens_total"),
                "cached_tokens": load.get("cached_tokens_total"),
                "output_tokens": load.get("output_tokens_total"),
                "address": engine["address"],
            }
        )
    return pd.DataFrame(rows)


def engine_state(engine: Mapping[str, Any]) -> str:
    if not engine["healthy"]:
        return f"away: {engine['reason']}"
    return "draining" if engine["draining"] else "ready"


def tenants_frame(tenants: Rows, usage: Rows) -> pd.DataFrame:
    """A line a tenant with what it used, the busiest first; `usage` are sums by tenant."""
    used = {group["group"]["tenant_id"]: group["totals"] for group in usage}
    rows = []
    for tenant in tenants:
        totals = used.get(tenant["id"], {})
        rows.append(
            {
                "tenant": tenant["name"],
                "class": tenant["service_class"],
                "weight": tenant["weight"],
                "status": tenant["status"],
                "requests": totals.get("requests", 0),
                "failed": totals.get("failed", 0),
                "prompt_tokens": totals.get("prompt_tokens", 0),
                "output_tokens": totals.get("output_tokens", 0),
                "ttft_ms": totals.get("mean_ttft_ms"),
            }
        )
    columns = ["tenant", "class", "weight", "status", "requests", "failed", "prompt_tokens", "output_tokens", "ttft_ms"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.sort_values(["output_tokens", "tenant"], ascending=[False, True], ignore_index=True)


def keys_frame(keys: Rows, projects: Rows, tenants: Rows) -> pd.DataFrame:
    """A line a key, by its last four characters; what works comes first."""
    tenant_names = {tenant["id"]: tenant["name"] for tenant in tenants}
    owners = {project["id"]: tenant_names.get(project["tenant_id"], "–") for project in projects}
    rows = [
        {
            "key": f"…{key['hint']}",
            "name": key["name"],
            "owner": owners.get(key["project_id"], "–") if key["project_id"] else name_of_role(key, tenant_names),
            "status": key["status"],
            "created": show_time(key["created_at"]),
            "expires": show_time(key["expires_at"]) or "never",
        }
        for key in keys
    ]
    frame = pd.DataFrame(rows, columns=["key", "name", "owner", "status", "created", "expires"])
    return frame.sort_values("status", kind="stable", ignore_index=True)


def name_of_role(key: Mapping[str, Any], tenant_names: Mapping[str, str]) -> str:
    """`owner`, or `viewer of acme`: whose an administrator's key is."""
    return f"{key['role']} of {tenant_names.get(key['tenant_id'], '–')}" if key["tenant_id"] else str(key["role"])


def requests_frame(requests: Rows, tenants: Rows) -> pd.DataFrame:
    """A line a request."""
    names = {tenant["id"]: tenant["name"] for tenant in tenants}
    rows = [
        {
            "started": parse_time(request["started_at"]),
            "tenant": names.get(request["tenant_id"], "–"),
            "outcome": request["outcome"],
            "prompt_tokens": request["prompt_tokens"],
            "output_tokens": request["output_tokens"],
            "ttft_ms": request["ttft_ms"],
            "duration_ms": request["duration_ms"],
        }
        for request in requests
    ]
    columns = ["started", "tenant", "outcome", "prompt_tokens", "output_tokens", "ttft_ms", "duration_ms"]
    return pd.DataFrame(rows, columns=columns)


def count_by_time(requests: pd.DataFrame, field: str, value: str | None, step: timedelta) -> pd.DataFrame:
    """Requests (or the sum of `value`) by time slot and by `field`: columns `slot`, the field, `amount`."""
    slots = requests["started"].dt.floor(pd.Timedelta(step))
    grouped = requests.assign(slot=slots).groupby(["slot", field], observed=True)
    amounts = grouped.size() if value is None else grouped[value].sum()
    return amounts.rename("amount").reset_index()


def hourly_frame(usage: Rows) -> pd.DataFrame:
    """Sums by hour and tenant as the charts want them: columns `slot`, `tenant`, requests by their end, tokens."""
    rows = []
    for group in usage:
        totals = group["totals"]
        broken = totals["failed"] + totals["rejected"] + totals["disconnected"]
        rows.append(
            {
                "slot": parse_time(group["group"]["hour"]),
                "tenant": group["group"]["tenant_name"] or group["group"]["tenant_id"],
                "served": totals["requests"] - broken,
                "disconnected": totals["disconnected"],
                "rejected": totals["rejected"],
                "failed": totals["failed"],
                "output_tokens": totals["output_tokens"],
            }
        )
    columns = ["slot", "tenant", "served", "disconnected", "rejected", "failed", "output_tokens"]
    return pd.DataFrame(rows, columns=columns)


def parse_time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def show_time(text: str | None) -> str | None:
    """To the minute, in the time zone of this machine."""
    moment = parse_time(text)
    return None if moment is None else f"{moment.astimezone():%Y-%m-%d %H:%M}"
