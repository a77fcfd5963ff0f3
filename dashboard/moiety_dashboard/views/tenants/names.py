"""Names of tenants, projects and keys by id, and the recent usage of each."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import streamlit as st

from moiety_dashboard import session
from moiety_dashboard.client import AdminClient, Answer
from moiety_dashboard.frames.limits import UsageRate, newest_keys, usage_rates
from moiety_dashboard.views.windows import HOUR

NAMES = "names"
FRESH_S = 30.0


def names_of(client: AdminClient) -> dict[str, str]:
    """Return names by id, cached for half a minute, since they seldom change and may be many."""
    return _read(client)[0]


def scope_names_of(client: AdminClient) -> dict[str, str]:
    """Return names by the ids that quotas have: for a rotated key that of its newest successor."""
    names, newest = _read(client)
    return names | {old: names[new] for old, new in newest.items() if new in names}


def _read(client: AdminClient) -> tuple[dict[str, str], dict[str, str]]:
    """Return names by id, and the newest successors of rotated keys by their ids."""
    known: tuple[float, dict[str, str], dict[str, str]] | None = st.session_state.get(NAMES)
    if known is not None and time.monotonic() - known[0] < FRESH_S:
        return known[1], known[2]
    names = {tenant["id"]: tenant["name"] for tenant in client.list("/tenants").data}
    with_tenant = not session.is_of_one_tenant()  # otherwise all are of the same one
    projects = client.list("/projects").data
    names |= {
        one["id"]: f"{names.get(one['tenant_id'], '–')} / {one['name']}" if with_tenant else one["name"]
        for one in projects
    }
    keys = client.list("/keys").data
    for key in keys:
        whose = names.get(key["project_id"] or (key["tenant_id"] if with_tenant else None) or "", "")
        names[key["id"]] = f"{whose} / {key['name']} …{key['hint']}".removeprefix(" / ")
    newest = newest_keys(keys)
    st.session_state[NAMES] = time.monotonic(), names, newest
    return names, newest


def forget_names() -> None:
    """Clear the cached names after an object is made or renamed."""
    st.session_state.pop(NAMES, None)


def read_usage_rates(client: AdminClient, tenant_id: str | None = None) -> tuple[Answer, dict[str, UsageRate]]:
    """Return the usage of tenants, projects and keys since the start of the last whole hour."""
    now = datetime.now(UTC)
    hour = now.replace(minute=0, second=0, microsecond=0)
    answer = client.get(
        "/usage",
        group_by="tenant,project,key",
        since=(hour - HOUR).isoformat(),
        until=(hour + HOUR).isoformat(),
        tenant_id=tenant_id,
    )
    return answer, usage_rates(answer.data["data"], (now - hour + HOUR).total_seconds())
