"""The audit log: each change with its author, and the verification of the hash chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, Answer
from moiety_dashboard.escaping import as_text
from moiety_dashboard.frames.changes import KINDS, audit_frame
from moiety_dashboard.page import Page
from moiety_dashboard.views.tenants.names import names_of

LIMIT = 200
NEWEST = 2**62
VERDICT = "audit verdict"
BEFORE = "audit before"


def draw(page: Page) -> None:
    panels.head("Audit", "Administrative changes, in a hash chain that shows tampering")
    with page.asking() as client:
        if session.may("audit.verify"):
            draw_verdict(client)
        first, second, third = st.columns([2, 2, 3])
        kinds = first.multiselect("Object type", list(KINDS), format_func=lambda kind: KINDS[kind], placeholder="any")
        actions = second.multiselect("Action", ["create", "change", "delete", "erase", "read"], placeholder="any")
        object_id = third.text_input("Object id", placeholder="ten_…, prj_…, key id or class name")
        before = st.session_state.get(BEFORE, NEWEST)
        answer = client.get("/audit", limit=LIMIT, before=before, object_id=object_id.strip() or None)
        draw_entries(answer, names_of(client), kinds, actions)
        turn(answer, before)


def draw_entries(answer: Answer, names: Mapping[str, str], kinds: list[str], actions: list[str]) -> None:
    frame = audit_frame(answer.data["data"], names)
    if kinds:
        frame = frame[frame["kind"].isin([KINDS[kind] for kind in kinds])]
    if actions:
        frame = frame[frame["action"].isin(actions)]
    whose = "all tenants" if answer.data["whole"] else "your tenant"
    with panels.panel("Changes", f"newest first, {whose}", [answer], key="audit", frame=frame):
        none = "No entry matches. Remove a filter, or go to older entries."
        panels.table(frame, columns(), none, max_rows=14)


def columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "seq": column.NumberColumn("No.", format="%d", width="small"),
        "at": panels.time_column("Time", "YYYY-MM-DD HH:mm:ss"),
        "actor": column.TextColumn("Actor", help="The key, or oidc: and the user"),
        "role": "Role",
        "action": "Action",
        "kind": "Object type",
        "change": column.TextColumn("Change", width="large"),
        "object": column.TextColumn("Object id", width="medium"),
    }


def turn(answer: Answer, before: int) -> None:
    """Draw the buttons to older entries and back."""
    left, right, _ = st.columns([1, 1, 3])
    older = answer.data["next_before"]
    if left.button("Older", icon=":material/chevron_left:", disabled=older is None, width="stretch"):
        st.session_state[BEFORE] = older
        st.rerun()
    if right.button("Newest", icon=":material/last_page:", disabled=before == NEWEST, width="stretch"):
        st.session_state.pop(BEFORE, None)
        st.rerun()


def draw_verdict(client: AdminClient) -> None:
    left, right = st.columns([4, 1], vertical_alignment="center")
    if right.button("Verify the chain", icon=":material/verified:", width="stretch"):
        st.session_state[VERDICT] = client.get("/audit/verification").data
    verdict = st.session_state.get(VERDICT)
    if verdict is None:
        left.caption(
            "Verify recomputes the whole hash chain on the gateway. `moiety audit verify` does the same on the "
            "command line."
        )
    elif verdict["intact"]:
        left.success(
            f"All {verdict['num_entries']:,d} entries are intact. Store the head, so that `moiety audit verify "
            f"--expect` can detect missing entries later: {verdict['num_entries']:d}:{as_text(verdict['head'])}",
            icon=":material/verified:",
        )
    else:
        left.error(f"The audit log was tampered with: {as_text(verdict['complaint'])}.", icon=":material/gpp_bad:")
