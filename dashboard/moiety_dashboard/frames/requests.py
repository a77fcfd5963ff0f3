"""Requests of the request log as frames. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import tzinfo
from decimal import Decimal
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import in_bytes, milliseconds, moment

COLUMNS = (
    *("at", "tenant", "key", "model", "route", "class", "outcome", "status_code", "error", "prompt_tokens"),
    *("cached_tokens", "output_tokens", "cost", "ttft_ms", "duration_ms", "slo", "end_user", "tags", "endpoint"),
    *("trace", "request_id"),
)
SLO = {True: "attained", False: "missed", None: None}


def requests_frame(requests: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per request, in the given order. `names` maps ids of tenants and keys; cost is in dollars."""
    rows = [
        {
            "at": moment(one["started_at"]),
            "tenant": names.get(one["tenant_id"], one["tenant_id"]),
            "key": names.get(one["key_id"], one["key_id"]),
            "class": one["service_class"],
            "status_code": one["http_status"],
            "error": one["error_code"],
            "cost": one["cost_nanodollars"] / 1e9,
            "slo": SLO[one["slo_attained"]],
            "tags": tags_in_line(one["tags"]),
            "trace": one["has_trace"],
            **{name: one[name] for name in COLUMNS if name in one and name != "tags"},
        }
        for one in requests
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def tags_in_line(tags: Mapping[str, str]) -> str | None:
    """Return the tags in one line, None without any."""
    return ", ".join(f"{name}={value}" for name, value in tags.items()) or None


def fields_frame(found: Mapping[str, Any], names: Mapping[str, str], zone: tzinfo) -> pd.DataFrame:
    """Return the fields of one request in words and with units, in the order in which one reads them.

    `names` maps ids of tenants, projects and keys. Fields that this release does not know come last, as they are.
    """
    known: dict[str, tuple[str, Callable[[Any], str | None]]] = {
        "request_id": ("Request", str),
        "started_at": ("Started", lambda text: _time(text, zone)),
        "tenant_id": ("Tenant", lambda one: _named(one, names)),
        "project_id": ("Project", lambda one: _named(one, names)),
        "key_id": ("Key", lambda one: _named(one, names)),
        "endpoint": ("Endpoint", str),
        "route": ("Route", str),
        "model": ("Model", str),
        "service_class": ("Class", str),
        "outcome": ("Outcome", str),
        "http_status": ("HTTP status", str),
        "error_code": ("Error code", str),
        "num_choices": ("Choices", _count),
        "prompt_tokens": ("Prompt tokens", _count),
        "cached_tokens": ("Cached prompt tokens", _count),
        "output_tokens": ("Output tokens", _count),
        "speculative_tokens": ("Tokens of speculative prefill", _count),
        "speculative_used_tokens": ("Cached tokens from speculative prefill", _count),
        "cost_nanodollars": ("Cost, after credits", _money),
        "spot_percent": ("Spot price", lambda percent: f"{percent} % of the class's price"),
        "queue_ms": ("Queue time", milliseconds),
        "ttft_ms": ("TTFT", milliseconds),
        "duration_ms": ("Duration", milliseconds),
        "num_preemptions": ("Preemptions", _count),
        "slo_attained": ("SLO", lambda attained: SLO[attained]),
        "predicted_ttft_ms": ("TTFT predicted by the quote", milliseconds),
        "predicted_duration_ms": ("Duration predicted by the quote", milliseconds),
        "guarantee_met": ("Guarantee of the quote", lambda met: "met" if met else "missed"),
        "credit_nanodollars": ("Credit", _money),
        "credit_reason": ("Reason of the credit", str),
        "end_user": ("End user", str),
        "tags": ("Tags", tags_in_line),
        "expert_read_bytes": ("Bytes of experts read", in_bytes),
        "expert_moved_bytes": ("Bytes of experts moved", in_bytes),
        "trace_id": ("Trace", str),
    }
    rows = [
        {"field": label, "value": None if found[name] is None else show(found[name])}
        for name, (label, show) in known.items()
        if name in found
    ]
    others = sorted(set(found) - set(known) - {"has_trace"})
    rows += [
        {"field": name.replace("_", " "), "value": None if (v := found[name]) is None else str(v)} for name in others
    ]
    return pd.DataFrame(rows, columns=["field", "value"])


def _time(text: str, zone: tzinfo) -> str:
    at = moment(text)
    assert at is not None, "a request has a start"
    return f"{at.astimezone(zone):%Y-%m-%d %H:%M:%S.%f}"[:-3] + f" {at.astimezone(zone):%Z}"


def _named(one: str, names: Mapping[str, str]) -> str:
    """Return the name with the id, which other systems have."""
    return f"{names[one]} ({one})" if one in names else one


def _count(number: int) -> str:
    return f"{number:,d}"


def _money(nanodollars: int) -> str:
    """Return an amount in dollars, exact to the nano-dollar."""
    return f"${Decimal(nanodollars).scaleb(-9).normalize():,f}"
