"""Quotas of all tenants: usage, leases, and the reconciliation of usage data."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import short
from moiety_dashboard.frames import limits
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.columns import limit_columns
from moiety_dashboard.views.tenants.limits import QUOTA_WRITES
from moiety_dashboard.views.tenants.names import names_of, read_usage_rates, scope_names_of

VERDICT = "reconciliation"


def draw(page: Page) -> None:
    page.live(draw_live, slower=2)
    if session.may("usage.reconcile"):
        with page.asking() as client:
            draw_reconciliation(client)


def draw_live(client: AdminClient) -> None:
    panels.head("Quotas", "Usage of all quotas, and the gateways that lease parts of them")
    quotas = client.list("/quotas")
    live = client.get("/quotas/leases", limit=500)
    lost = client.get("/quotas/leases", limit=500, lease_state="quarantined")
    usage, by_scope = read_usage_rates(client)
    names = scope_names_of(client)
    frame = limits.quotas_frame(quotas.data, names, by_scope, datetime.now(UTC))
    rejected = limits.num_rejected(usage.data["data"])
    panels.tiles(tiles(frame, live.data, lost.data, rejected), [quotas, live, lost, usage])
    with panels.panel(
        "Quotas", "now; usage rate of the last one to two hours", [quotas, usage], key="limits", frame=frame
    ):
        none = f"No quota is set.{session.advice('Set one on the Tenants page.', QUOTA_WRITES)}"
        panels.table(frame, limit_columns(), none)
    held, quarantined = (limits.leases_frame(answer.data["data"], names) for answer in (live, lost))
    with panels.panel("Leases", "parts of quotas that gateways hold now", [live], key="leases", frame=held):
        none = "No gateway holds a lease: no request under a quota was sent recently."
        panels.table(held, lease_columns(), none)
    note = "leases of crashed gateways; they count as spent until the engines report otherwise"
    with panels.panel("Quarantine", note, [lost], key="quarantine", frame=quarantined):
        panels.table(quarantined, lease_columns(), "No lease is in quarantine.")


def tiles(frame: pd.DataFrame, live: Mapping[str, Any], lost: Mapping[str, Any], num_rejected: int) -> list[Tile]:
    """Return the figures of the page. `num_rejected` are the requests rejected in the last one to two hours."""
    is_exhausted = frame["exhausted"].astype(bool)
    exhausted = int(is_exhausted.sum())
    near = int(((frame["share"] >= 0.8) & ~is_exhausted).sum())
    more = "+" if live["truncated"] else ""
    gateways = len({lease["replica_id"] for lease in live["data"]})
    return [
        Tile("Quotas", f"{len(frame)}", "on tenants, projects and keys"),
        Tile("Exhausted, now", f"{exhausted}", "a usual request gets 429"),
        Tile("Rejected, 1–2 h", f"{num_rejected:,d}", "requests, for any reason"),
        Tile("Over 80 %, now", f"{near}", "of the cap"),
        Tile("Leases, now", f"{len(live['data'])}{more}", f"held by {gateways} gateway{'s'[: gateways != 1]}"),
        Tile("Quarantined, now", f"{len(lost['data'])}", "leases of crashed gateways"),
    ]


def lease_columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "state": "State",
        "scope": "Scope",
        "limit": "Quota",
        "gateway": column.TextColumn("Gateway", width="medium"),
        "granted": "Granted",
        "settled": column.TextColumn("Settled", help="Booked as usage"),
        "left": "Remaining",
        "expires": panels.time_column("Expires", "HH:mm:ss"),
    }


def draw_reconciliation(client: AdminClient) -> None:
    """Compare requests, ledger, hours and quotas on request; it reads all usage, so it is slow."""
    st.subheader("Reconciliation", anchor=False)
    left, right = st.columns([4, 1], vertical_alignment="center")
    left.caption("Compares requests, ledger, hourly sums and quotas of the last 24 hours, to the token.")
    if right.button("Reconcile now", icon=":material/balance:", width="stretch"):
        st.session_state[VERDICT] = client.get("/usage/reconciliation")
    answer = st.session_state.get(VERDICT)
    if answer is None:
        return
    found = answer.data
    note = " to ".join(found[name][:16].replace("T", " ") for name in ("since", "until")) + " UTC"
    rows = different_records(found, names_of(client))
    frame = pd.DataFrame(rows, columns=["record", "found", "expected"])
    with panels.panel("Result", note, [answer], key="reconciliation", frame=frame):
        total = found["total"]
        compared = f"{short(total['requests'])} requests and {short(total['output_tokens'])} output tokens of "
        compared += f"{as_text(found['tenants'])} tenants"
        if found["agrees"]:
            st.success(f"Requests, ledger, hours and quotas agree: {compared}.", icon=":material/check_circle:")
        else:
            st.error(f"{len(frame)} records do not agree; the table lists them.", icon=":material/error:")
            panels.table(frame, {"record": "Record", "found": "Found", "expected": "Expected"}, "")


def different_records(found: Mapping[str, Any], names: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the records that do not agree. `names` has the names of tenants by their ids."""
    tenants = [*different_tenants(found, names), *different_days(found, names)]
    return [*tenants, *different_windows(found), *quarantined_usage(found)]


def quarantined_usage(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return unbilled usage: all quarantined rows, and all unreadable lines."""
    unbilled = found.get("quarantined_usage") or {}
    counts = {
        "quarantined usage rows": unbilled.get("rows", 0),
        "unreadable usage lines": unbilled.get("unreadable_lines", 0),
    }
    return [{"record": what, "found": str(count), "expected": "0"} for what, count in counts.items() if count]


def different_tenants(found: Mapping[str, Any], names: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {
            "record": f"{book} of {names.get(one['tenant_id'], one['tenant_id'])}",
            "found": str(one[book]),
            "expected": str(one["ledger"]),
        }
        for one in found["differences"]
        for book in ("requests", "hours")
        if one[book] != one["ledger"]
    ]


def different_days(found: Mapping[str, Any], names: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {
            "record": f"days of {names.get(one['tenant_id'], one['tenant_id'])}",
            "found": str(one["days"]),
            "expected": str(one["hours"]),
        }
        for one in found["days"]
    ]


def different_windows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "record": f"leases of {one['quota_id']} from {one['start']}",
            "found": f"granted {one['granted_to_leases']}, settled {one['settled_by_leases']}",
            "expected": f"granted {one['granted']}, settled {one['settled']}",
        }
        for one in found["windows"]
    ]
