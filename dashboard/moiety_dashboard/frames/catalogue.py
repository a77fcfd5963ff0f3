"""Models, adapters, batches, prices, webhooks and alerts as frames. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import moment, ratio

Rows = Sequence[Mapping[str, Any]]

MODEL_COLUMNS = (
    *("model", "status", "context", "features", "input", "output", "running", "waiting", "replicas"),
    *("output_per_s", "tenants", "routes", "adapters", "family"),
)
PRICE_COLUMNS = ("class", "input", "cached_input", "output")
USER_COLUMNS = ("tenant", "class")
ADAPTER_COLUMNS = ("served_as", "tenant", "state", "bytes", "source", "created", "id")
BATCH_COLUMNS = (
    *("id", "tenant", "project", "status", "progress", "lines", "completed", "failed", "tokens", "endpoint"),
    *("created", "ended", "expires"),
)
WEBHOOK_COLUMNS = ("address", "format", "events", "pending", "dead", "delivered", "failed", "error", "id")
FIRING_COLUMNS = ("group", "subject", "since")
ALERT_COLUMNS = ("at", "type", "status", "severity", "summary", "subject", "tenant", "id")
FEATURES = {
    "chat": "chat",
    "completions": "completions",
    "tools": "tools",
    "reasoning": "reasoning",
    "structured_outputs": "structured outputs",
    "vision": "vision",
    "embeddings": "embeddings",
    "scores": "scores",
    "lora": "LoRA",
    "logprobs": "logprobs",
}


def models_frame(models: Rows, usual_class: str, rates: Mapping[str, float | None]) -> pd.DataFrame:
    """Return one row per model; prices are those of the usual class, `rates` are output tokens per second."""
    rows = []
    for one in models:
        load, price = one["load"] or {}, one["prices"].get(usual_class, {})
        row = {
            "model": one["model"],
            "status": one["status"],
            "context": one["max_context_tokens"],
            "features": ", ".join(FEATURES.get(name, name) for name in one["features"]),
            "input": dollars_of(price.get("input")),
            "output": dollars_of(price.get("output")),
            "running": load.get("num_running"),
            "waiting": load.get("num_waiting"),
            "replicas": f"{load['num_ready']} of {load['num_replicas']}" if load else None,
            "output_per_s": rates.get(one["model"]),
            "tenants": one["num_tenants"],
            "routes": ", ".join(one["routes"]) or None,
            "adapters": len(one["adapters"]),
            "family": one["family"],
        }
        rows.append(row)
    return pd.DataFrame(rows, columns=list(MODEL_COLUMNS))


def names_for_requests(models: Rows) -> list[str]:
    """Return the names that requests can have: models, their adapters, and routes."""
    names = [name for one in models for name in (one["model"], *one["adapters"])]
    return list(dict.fromkeys([*names, *(route for one in models for route in one["routes"])]))


def usual_class_of(models: Rows) -> str:
    """Return the class whose prices the table of models shows: standard, or the first that is priced."""
    names = [name for one in models for name in one["prices"]]
    return "standard" if "standard" in names or not names else names[0]


def class_prices_frame(model: Mapping[str, Any]) -> pd.DataFrame:
    """Return the prices of a model by class, in dollars per million tokens."""
    rows = [{"class": name, **{k: dollars_of(v) for k, v in of.items()}} for name, of in model["prices"].items()]
    return pd.DataFrame(rows, columns=list(PRICE_COLUMNS))


def users_frame(model: Mapping[str, Any]) -> pd.DataFrame:
    """Return the tenants that may use a model."""
    rows = [{"tenant": one["name"], "class": one["service_class"]} for one in model["tenants"]]
    return pd.DataFrame(rows, columns=list(USER_COLUMNS))


def prices_frame(prices: Rows) -> pd.DataFrame:
    """Return one row per price; without a class it applies to all classes, times their factors."""
    rows = [
        {
            "model": one["model"],
            "class": one["service_class"] or "all",
            **{name: dollars_of(one[name]) for name in ("input", "cached_input", "output")},
        }
        for one in prices
    ]
    return pd.DataFrame(rows, columns=["model", *PRICE_COLUMNS])


def adapters_frame(adapters: Rows, names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per adapter."""
    rows = [
        {
            "served_as": one["served_as"],
            "tenant": names.get(one["tenant_id"], one["tenant_id"]),
            "state": one["state"],
            "bytes": one["num_bytes"] if one["engine_adapter"] is None else None,  # unknown: the engine has it
            "source": "uploaded" if one["engine_adapter"] is None else f"engine: {one['engine_adapter']}",
            "created": moment(one["created_at"]),
            "id": one["id"],
        }
        for one in adapters
    ]
    return pd.DataFrame(rows, columns=list(ADAPTER_COLUMNS))


def batches_frame(batches: Rows, names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per batch; progress is the share of its lines that have ended."""
    rows = [
        {
            "id": one["id"],
            "tenant": names.get(one["tenant_id"], one["tenant_id"]),
            "project": names.get(one["project_id"], one["project_id"]),
            "status": one["status"].replace("_", " "),
            "progress": ratio(one["completed"] + one["failed"], one["total"]),
            "lines": one["total"],
            "completed": one["completed"],
            "failed": one["failed"],
            "tokens": one["prompt_tokens"] + one["output_tokens"],
            "endpoint": one["endpoint"],
            "created": moment(one["created_at"]),
            "ended": moment(one["ended_at"]),
            "expires": moment(one["expires_at"]),
        }
        for one in batches
    ]
    return pd.DataFrame(rows, columns=list(BATCH_COLUMNS))


def webhooks_frame(webhooks: Rows) -> pd.DataFrame:
    """Return one row per webhook."""
    rows = [
        {
            "address": shown_address(one),
            "format": one["format"],
            "events": ", ".join(one["events"]),
            "pending": one["pending"],
            "dead": one["dead"],
            "delivered": moment(one["delivered_at"]),
            "failed": moment(one["failed_at"]),
            "error": one["last_error"],
            "id": one["id"],
        }
        for one in webhooks
    ]
    return pd.DataFrame(rows, columns=list(WEBHOOK_COLUMNS))


def shown_address(webhook: Mapping[str, Any]) -> str:
    """Return the address of a webhook; of Slack, whose paths are secrets, the host and the last four characters."""
    url = str(webhook["url"])
    if webhook["format"] != "slack":
        return url
    host = url.removeprefix("https://").partition("/")[0]
    return f"https://{host}/…{url[-4:]}"


def firing_frame(firing: Rows) -> pd.DataFrame:
    """Return one row per condition that fires now."""
    rows = [{"group": one["group"], "subject": one["subject"], "since": moment(one["since"])} for one in firing]
    return pd.DataFrame(rows, columns=list(FIRING_COLUMNS))


def alerts_frame(alerts: Rows, names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per alert, newest first."""
    rows = [
        {
            "at": moment(one["at"]),
            "tenant": names.get(one["tenant_id"] or "", one["tenant_id"]),
            "subject": _subject(one["subject"], names),
            **{name: one[name] for name in ("type", "status", "severity", "summary", "id")},
        }
        for one in alerts
    ]
    return pd.DataFrame(rows, columns=list(ALERT_COLUMNS))


def _subject(subject: str, names: Mapping[str, str]) -> str:
    """Return the subject of an alert, with the name of a quota's scope in place of its id."""
    level, _, scope_id = subject.partition(" ")
    return f"{level} {names[scope_id]}" if scope_id in names else subject


def dollars_of(text: str | None) -> float | None:
    """Return an amount of the API as a number; None without one, or for a text that is none."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
