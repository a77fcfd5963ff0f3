"""Guardrails: checks of the text of requests and answers. Set, replace and delete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, path_of
from moiety_dashboard.frames.rules import CHECKS, guardrails_frame
from moiety_dashboard.page import Page

NEW = "new guardrail"
NONE, HOW = "No guardrail is set: texts are not checked.", "Set one below."
STAGES = {"input": "requests", "output": "answers"}
ACTIONS = {"block": "block the text", "observe": "only note it"}
FAILURES = {"closed": "the request fails (503)", "open": "the text passes"}
KINDS = {"detectors": "built-in detectors", "url": "HTTP endpoint", "entry_point": "Python entry point"}
ALL_TENANTS = "all tenants"
EFFECT = "It checks no further requests."  # of a deletion


def draw(page: Page) -> None:
    panels.head("Guardrails", "Checks of the text of requests and answers")
    with page.asking() as client:
        answer, tenants = client.get("/guardrails"), client.list("/tenants").data
        guardrails = answer.data["data"]
        names = {one["id"]: one["name"] for one in tenants}
        frame = guardrails_frame(guardrails, names)
        with panels.panel("Guardrails", "by name", [answer], key="guardrails", frame=frame):
            none = f"{NONE}{session.advice(HOW, 'guardrails.write')}"
            panels.table(frame, columns(), none, max_rows=16)
        if not panels.may_change("guardrails.write", "guardrails"):
            return
        left, right = st.columns([3, 2])
        with left:
            ask_guardrail(client, guardrails, names)
        with right:
            labels = {path_of("guardrails", one["name"]): one["name"] for one in guardrails}
            panels.choose_deletion(client, "guardrail", labels, EFFECT)


def ask_guardrail(client: AdminClient, guardrails: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> None:
    """Draw the fields of a new guardrail, or of one that is replaced."""
    with st.container(border=True):
        st.markdown("**Set a guardrail**")
        chosen = st.selectbox("Guardrail", [NEW, *(one["name"] for one in guardrails)], key="chosen guardrail")
        known = next((one for one in guardrails if one["name"] == chosen), {})
        key = f"guardrail {chosen}"
        name = known.get("name") or st.text_input(
            "Name", placeholder="no-secrets", help="Lower-case letters, digits and hyphens", key="guardrail name"
        )
        first, second, third = st.columns(3)
        body = {
            "name": name.strip(),
            "stage": choose(first, "Checks", STAGES, known.get("stage"), f"{key} stage"),
            "action": choose(second, "If something is found", ACTIONS, known.get("action"), f"{key} action"),
            "on_failure": choose(third, "If the check fails", FAILURES, known.get("on_failure"), f"{key} failure"),
        }
        present = next((kind for kind in KINDS if known.get(kind)), None)
        kind = choose(st, "Check", KINDS, present, f"{key} kind")
        body |= ask_check(kind, known, key)
        tenants, present_tenant = [None, *names], known.get("tenant_id")
        body["tenant_id"] = st.selectbox(
            "Tenant",
            tenants,
            tenants.index(present_tenant) if present_tenant in tenants else 0,
            format_func=lambda tenant: ALL_TENANTS if tenant is None else names[tenant],
            key=f"{key} tenant",
        )
        if st.button("Set guardrail", type="primary"):
            panels.put(client, "/guardrails", body, f"The guardrail {body['name']}")


def choose(place: Any, label: str, words: Mapping[str, str], known: str | None, key: str) -> str:
    """Return the chosen one of the words' names; the known one, or else the first, is chosen before."""
    options = list(words)
    at = options.index(known) if known in options else 0
    found: str = place.selectbox(label, options, at, format_func=lambda option: words[option], key=key)
    return found


def ask_check(kind: str, known: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the fields of a check of this kind."""
    if kind == "detectors":
        chosen = [one for one in known.get("detectors", CHECKS) if one in CHECKS] or list(CHECKS)
        return {
            kind: st.multiselect("Detectors", list(CHECKS), chosen, format_func=lambda one: CHECKS[one], key=f"{key} d")
        }
    example = "https://guard.example.com/check" if kind == "url" else "acme_policy"
    label = "Address" if kind == "url" else "Entry point in moiety.guardrails"
    text = st.text_input(label, known.get(kind) or "", placeholder=example, key=f"{key} {kind}")
    left, right = st.columns(2)
    found: dict[str, Any] = {kind: text.strip()}
    timeout_ms = known.get("timeout_ms", 1000)
    found["timeout_ms"] = left.number_input("Timeout of a check, ms", 10, 30_000, timeout_ms, key=f"{key} timeout")
    if kind == "entry_point":
        memory_mb = known.get("memory_mb", 512)
        found["memory_mb"] = right.number_input("Memory, MiB", 16, 65_536, memory_mb, key=f"{key} memory")
    return found


def columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "name": "Name",
        "stage": column.TextColumn("Checks", help="input: requests; output: answers"),
        "action": "Action",
        "check": "Check",
        "timeout_ms": panels.count_column("Timeout, ms"),
        "on_failure": column.TextColumn("Fails", help="closed: the request fails with 503; open: the text passes"),
        "tenant": "Tenant",
    }
