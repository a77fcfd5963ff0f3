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
            "change": in_words(entry, names),
            "object": entry["object_id"],
        }
        for entry in entries
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def in_words(entry: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return a change field by field; for a created or deleted object, its fields. Quotas have their scope's name."""
    before, after = entry["before"], entry["after"]
    if entry["erased_at"] is not None:
        return "(erased)"
    if before is None or after is None:
        row = after or before or {}
        shown = {name: _show(name, row) for name in IDENTIFYING if row.get(name) not in (None, "")}
        return " ".join((shown | _scope_of(row, names)).values())
    changed = [name for name in after if before.get(name) != after[name]]
    told = ", ".join(f"{name}: {_show(name, before)} → {_show(name, after)}" for name in changed)
    scope = _scope_of(after, names).get("level")
    return told if scope is None else f"{scope} {after.get('kind')}, {told}"


def _scope_of(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """Return the level and the name of a quota's scope; nothing for other objects, and for an unknown scope."""
    name = names.get(row.get("scope_id", ""))
    return {} if name is None else {"level": f"{row['level']} {name}"}


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
