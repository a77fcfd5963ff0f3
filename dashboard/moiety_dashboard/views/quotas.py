"""Quotas of all tenants: those near their end, their leases, and the consistency of the books."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient
from moiety_dashboard.escaping import as_text
from moiety_dashboard.figures import short
from moiety_dashboard.frames import limits
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.columns import limit_columns
from moiety_dashboard.views.tenants.names import names_of, read_paces

VERDICT = "reconciliation"


def draw(page: Page) -> None:
    page.live(draw_live, slower=2)
    if session.may("usage.reconcile"):
        with page.asking() as client:
            draw_drift(client)


def draw_live(client: AdminClient) -> None:
    panels.head("Quotas", "Limits that are near their end, and who holds what of them")
    quotas = client.list("/quotas")
    live = client.get("/quotas/leases", limit=500)
    lost = client.get("/quotas/leases", limit=500, lease_state="quarantined")
    usage, by_scope = read_paces(client)
    names = names_of(client)
    frame = limits.quotas_frame(quotas.data, names, by_scope, datetime.now(UTC))
    panels.tiles(tiles(frame, live.data, lost.data), [quotas, live, lost])
    with panels.panel("Limits", "as of now; pace of the last hour or so", [quotas, usage], key="limits", frame=frame):
        none = "There is no limit. Set one on the Tenants page."
        panels.table(frame, limit_columns(), none)
    held, quarantined = (limits.leases_frame(answer.data["data"], names) for answer in (live, lost))
    with panels.panel("Leases", "parts of limits that gateways hold now", [live], key="leases", frame=held):
        none = "No gateway holds a part of a limit: nothing limited was requested lately."
        panels.table(held, lease_columns(), none)
    note = "parts of gateways that are gone; they count as spent until the engines prove otherwise"
    with panels.panel("Quarantine", note, [lost], key="quarantine", frame=quarantined):
        panels.table(quarantined, lease_columns(), "Nothing is quarantined.")


def tiles(frame: pd.DataFrame, live: Mapping[str, Any], lost: Mapping[str, Any]) -> list[Tile]:
    gone = int((frame["share"] >= 1).sum())
    near = int(((frame["share"] >= 0.8) & (frame["share"] < 1)).sum())
    more = "+" if live["truncated"] else ""
    gateways = len({lease["replica_id"] for lease in live["data"]})
    return [
        Tile("Limits", f"{len(frame)}", "on tenants, projects and keys"),
        Tile("Used up, now", f"{gone}", "what comes is answered 429"),
        Tile("Over 80 %, now", f"{near}", "of their cap"),
        Tile("Leases, now", f"{len(live['data'])}{more}", f"held by {gateways} gateway{'s'[: gateways != 1]}"),
        Tile("Quarantined, now", f"{len(lost['data'])}", "leases of gateways that are gone"),
    ]


def lease_columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "state": "State",
        "scope": column.TextColumn("On", width="medium"),
        "limit": "Of",
        "gateway": column.TextColumn("Gateway", width="medium"),
        "granted": "Granted",
        "settled": column.TextColumn("Settled", help="Booked as used"),
        "left": "Left",
        "expires": panels.time_column("Renewed until", "HH:mm:ss"),
    }


def draw_drift(client: AdminClient) -> None:
    """Check on request that requests, ledger, hours and limits agree; it adds up everything, so it is slow."""
    st.subheader("Drift", anchor=False)
    left, right = st.columns([4, 1], vertical_alignment="center")
    left.caption("Compares requests, ledger, sums of hours and limits of the last 24 hours, to the token.")
    if right.button("Compare now", icon=":material/balance:", width="stretch"):
        st.session_state[VERDICT] = client.get("/usage/reconciliation")
    answer = st.session_state.get(VERDICT)
    if answer is None:
        return
    found = answer.data
    note = f"{found['since'][:16]} to {found['until'][:16]} UTC"
    rows = [*different_tenants(found), *different_days(found), *different_windows(found), *rows_set_aside(found)]
    frame = pd.DataFrame(rows, columns=["what", "says", "instead of"])
    with panels.panel("Books", note, [answer], key="books", frame=frame):
        total = found["total"]
        said = f"{short(total['requests'])} requests and {short(total['output_tokens'])} output tokens of "
        said += f"{as_text(found['tenants'])} tenants"
        if found["agrees"]:
            st.success(f"Requests, ledger, hours and limits agree: {said}.", icon=":material/check_circle:")
        else:
            st.error(f"They do not agree, in {len(frame)} places.", icon=":material/error:")
            st.dataframe(frame, hide_index=True, width="stretch")


def rows_set_aside(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return unbilled usage: all quarantined rows, and all unreadable lines."""
    aside = found.get("set_aside") or {}
    counts = {"usage rows set aside": aside.get("rows", 0), "unreadable usage lines": aside.get("unreadable_lines", 0)}
    return [{"what": what, "says": str(count), "instead of": "0"} for what, count in counts.items() if count]


def different_tenants(found: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {"what": f"{book} of {one['tenant_id']}", "says": str(one[book]), "instead of": str(one["ledger"])}
        for one in found["differences"]
        for book in ("requests", "hours")
        if one[book] != one["ledger"]
    ]


def different_days(found: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {"what": f"days of {one['tenant_id']}", "says": str(one["days"]), "instead of": str(one["hours"])}
        for one in found["days"]
    ]


def different_windows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "what": f"leases of {one['quota_id']} from {one['start']}",
            "says": f"granted {one['granted_to_leases']}, settled {one['settled_by_leases']}",
            "instead of": f"granted {one['granted']}, settled {one['settled']}",
        }
        for one in found["windows"]
    ]
