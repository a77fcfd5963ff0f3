"""Quotas of a tenant, its projects and keys: their usage, and a change with a preview of its effect."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, path_of
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import show_time
from moiety_dashboard.frames import limits
from moiety_dashboard.views.columns import limit_columns
from moiety_dashboard.views.key_forms import dollars_of, nano_of
from moiety_dashboard.views.tenants.names import read_usage_rates

THRESHOLDS, MAX_THRESHOLDS = (50, 75, 80, 90, 95, 100), 5
QUOTA_WRITES = "quotas.write", "tenant_quotas.write"
Scope = tuple[str, str]  # level and id


def draw(client: AdminClient, tenant: Mapping[str, Any]) -> None:
    quotas = client.list("/quotas", tenant_id=tenant["id"])
    keys = client.list("/keys", tenant_id=tenant["id"]).data
    newest = limits.newest_keys(keys)
    listed = [quota | {"scope_id": newest.get(quota["scope_id"], quota["scope_id"])} for quota in quotas.data]
    usage, by_scope = read_usage_rates(client, tenant["id"])
    scopes = scopes_of(client, tenant, keys)
    names = {key["id"]: label_of(key) for key in keys} | {scope_id: name for (_, scope_id), name in scopes.items()}
    now = datetime.now(UTC)
    frame = limits.quotas_frame(listed, names, by_scope, now)
    note = "every quota applies to a request; usage rate of the last one to two hours"
    with panels.panel("Quotas", note, [quotas, usage], key="own limits", frame=frame):
        how = session.advice("Set a quota below.", QUOTA_WRITES)
        panels.table(frame, limit_columns(), f"No quota is set: usage is unlimited.{how}")
    allowed = {
        scope: name
        for scope, name in scopes.items()
        if session.may("tenant_quotas.write" if scope[0] == "tenant" else "quotas.write")
    }
    if not allowed:
        st.caption("Your role can view quotas, but not change them.")
        return
    left, right = st.columns([3, 2])
    with left.container(border=True):
        ask_change(client, allowed, listed, by_scope, now)
    with right.container(border=True):
        ask_removal(client, allowed, listed)


def label_of(key: Mapping[str, Any]) -> str:
    return f"{key['name']} …{key['hint']}"


def scopes_of(client: AdminClient, tenant: Mapping[str, Any], keys: list[dict[str, Any]]) -> dict[Scope, str]:
    """Return all objects of this tenant that can have a limit."""
    found = {("tenant", tenant["id"]): tenant["name"]}
    for project in client.list("/projects", tenant_id=tenant["id"]).data:
        found["project", project["id"]] = project["name"]
    for key in keys:
        if key["status"] == "active" and key["project_id"]:
            found["key", key["id"]] = label_of(key)
    return found


def ask_change(
    client: AdminClient,
    scopes: Mapping[Scope, str],
    quotas: list[dict[str, Any]],
    by_scope: Mapping[str, limits.UsageRate],
    now: datetime,
) -> None:
    """Draw fields that show their effect at once."""
    st.markdown("**Set a quota**")
    first, second, third = st.columns(3)
    scope = first.selectbox("Scope", list(scopes), format_func=lambda scope: f"{scope[0]} {scopes[scope]}")
    kind = second.selectbox("Kind", list(limits.KINDS), 3, format_func=lambda kind: limits.KINDS[kind])
    current = next((quota for quota in quotas if (quota["scope_id"], quota["kind"]) == (scope[1], kind)), None)
    cap = ask_cap(third, kind, current, scope)
    more = ask_thresholds(kind, current, scope)
    for sentence in limits.preview(kind, cap, current, by_scope.get(scope[1]), now):
        st.markdown(f"- {sentence}")
    if not st.button("Set quota", type="primary"):
        return
    body = {"level": scope[0], "scope_id": scope[1], "kind": kind, "cap": cap, **more}
    done = f"Quota set: {limits.amount(kind, cap)} {limits.KINDS[kind].removeprefix('dollars ')}."

    def put() -> Any:
        return client.change("PUT", "/quotas", body)

    if cap == 0 or (current is not None and cap < current["used"]):
        panels.ask_first(
            "With this cap **all requests get 429 from now on**. Set the quota?", "Set quota anyway", put, done
        )
    elif panels.attempt(put, done) is not None:
        st.rerun()


def ask_cap(place: Any, kind: str, current: Mapping[str, Any] | None, scope: Scope) -> int:
    """Return a cap in the unit of the API; users enter dollars."""
    key = f"cap {scope[1]} {kind}"
    if limits.is_money(kind):
        shown = dollars_of(current["cap"]) if current else 10.0
        dollars: float = place.number_input("Cap, dollars", 0.0, value=shown, key=key)
        return current["cap"] if current and dollars == shown else nano_of(dollars)
    cap: int = place.number_input("Cap", 0, value=current["cap"] if current else 1000, key=key)
    return cap


def ask_thresholds(kind: str, current: Mapping[str, Any] | None, scope: Scope) -> dict[str, Any]:
    """Return the percentages of the cap that alert, as the API takes them; nothing for quotas that have none."""
    if not limits.is_stock(kind):
        return {}
    known = list(current["alert_at"]) if current else []
    chosen = st.multiselect(
        "Alert at, % of the cap", sorted({*THRESHOLDS, *known}), known, placeholder="no alert",
        max_selections=MAX_THRESHOLDS, key=f"alerts {scope[1]} {kind}", help="Webhooks are notified at each, once.",
    )  # fmt: skip
    return {"alert_at": sorted(chosen)}


def ask_removal(client: AdminClient, scopes: Mapping[Scope, str], quotas: list[dict[str, Any]]) -> None:
    st.markdown("**Delete a quota**")
    mine = {quota["id"]: quota for quota in quotas if (quota["level"], quota["scope_id"]) in scopes}
    if not mine:
        st.caption("You cannot delete any of these quotas." if quotas else "There is no quota.")
        return

    def label(quota_id: str) -> str:
        quota = mine[quota_id]
        return f"{limits.in_words(quota)} on {quota['level']} {scopes[quota['level'], quota['scope_id']]}"

    chosen = st.selectbox("Quota", list(mine), format_func=label)
    st.caption(f"{as_text(label(chosen))}, created {show_time(mine[chosen]['created_at'], session.zone())}")
    if st.button("Delete quota", icon=":material/delete:"):
        panels.ask_deletion(
            client,
            path_of("quotas", chosen),
            f"Delete the quota **{as_text(label(chosen))}**? It stops applying from the next request.",
            "Quota deleted.",
        )
