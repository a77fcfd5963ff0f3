"""The audit log in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import moment

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
            "kind": entry["object_kind"],
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
        fields = [
            row.get(name) for name in ("name", "level", "kind", "model", "cap", "role") if row.get(name) is not None
        ]
        return " ".join(map(str, fields))
    changed = [name for name in after if before.get(name) != after[name]]
    return ", ".join(f"{name}: {_show(before.get(name))} → {_show(after[name])}" for name in changed)


def _show(value: Any) -> str:
    return "none" if value is None else str(value)
