"""The audit log in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import dollars, moment

KINDS = {  # of the objects, which the log names by their tables
    "tenants": "tenants", "projects": "projects", "api_keys": "keys", "users": "users", "key_policies": "key policies",
    "quotas": "quotas", "service_classes": "classes", "prices": "prices", "routes": "routes",
    "guardrails": "guardrails", "jwt_issuers": "issuers of JWTs", "jwt_grants": "grants of JWTs",
    "content_logging": "content logging", "request_contents": "contents of requests", "agent_runs": "agent runs",
    "engines": "engines", "webhooks": "webhooks", "adapters": "adapters",
    "declarations": "declarations", "idempotent_requests": "stored answers", "audit_log": "audit log",
}  # fmt: skip
IDENTIFYING = ("name", "email", "url", "level", "kind", "model", "service_class", "cap", "role")
COLUMNS = ("seq", "at", "actor", "role", "action", "kind", "change", "object")


def audit_frame(entries: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per change. `names` maps key ids to names."""
    rows = [
        {
            "seq": entry["seq"],
            "at": moment(entry["at"]),
            "actor": names.get(entry["actor"], entry["actor"]),
            "role": entry["actor_role"] or "",
            "action": entry["action"],
            "kind": KINDS.get(entry["object_kind"], entry["object_kind"]),
            "change": in_words(entry),
            "object": entry["object_id"],
        }
        for entry in entries
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def in_words(entry: Mapping[str, Any]) -> str:
    """Return a change field by field; for a created or deleted object, its fields."""
    before, after = entry["before"], entry["after"]
    if entry["erased_at"] is not None:
        return "(erased)"
    if before is None or after is None:
        row = after or before or {}
        return " ".join(_show(name, row) for name in IDENTIFYING if row.get(name) not in (None, ""))
    changed = [name for name in after if before.get(name) != after[name]]
    return ", ".join(f"{name}: {_show(name, before)} → {_show(name, after)}" for name in changed)


def _show(name: str, row: Mapping[str, Any]) -> str:
    """Return a field of an object for people: caps of money in dollars, and times to the second."""
    value = row.get(name)
    if value is None:
        return "none"
    if name == "cap":
        return dollars(value) if str(row.get("kind")).startswith("money") else f"{value:,d}"
    if name.endswith("_at") and isinstance(value, str):
        return f"{moment(value):%Y-%m-%d %H:%M:%S} UTC"
    return str(value)
