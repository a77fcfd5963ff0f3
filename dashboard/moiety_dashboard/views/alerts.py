"""Alerts: the conditions that fire now, and the newest alerts, as webhooks have received them."""

from __future__ import annotations

from typing import Any

import streamlit as st

from moiety_dashboard import colours, panels, session
from moiety_dashboard.client import AdminClient
from moiety_dashboard.frames.catalogue import alerts_frame, firing_frame
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.tenants.limits import QUOTA_WRITES
from moiety_dashboard.views.tenants.names import names_of

STATES = {"firing": colours.BAD, "resolved": colours.GOOD}
NONE = "No alert yet. A quota alerts at the percentages of its cap that are set for it."
HOW = "Set them on the Tenants page, with the quota."
WEBHOOKS = "webhooks"  # path of the page of webhooks, which not every user may see


def draw(page: Page) -> None:
    page.live(draw_live, slower=2)
    if WEBHOOKS in page.others:
        st.page_link(page.others[WEBHOOKS], label="Receivers of alerts", icon=":material/webhook:")


def draw_live(client: AdminClient) -> None:
    of_tenant, of_all = "Thresholds of quotas and budgets", "Engines, SLOs, disks, and thresholds of quotas and budgets"
    panels.head("Alerts", of_tenant if session.is_of_one_tenant() else of_all)
    answer = client.get("/alerts")
    firing, alerts = firing_frame(answer.data["firing"]), alerts_frame(answer.data["data"], names_of(client))
    if not session.is_of_one_tenant():
        figures = [Tile("Firing, now", f"{len(firing)}", "engines, SLOs and disks")]
        for group, label in (("engine", "Engines down"), ("slo", "SLOs burning"), ("disk", "Disks nearly full")):
            figures.append(Tile(label, f"{int((firing['group'] == group).sum())}", "now"))
        panels.tiles(figures, [answer], key="alert figures")
        with panels.panel("Firing now", "until a gateway sees the end", [answer], key="firing", frame=firing):
            none = "Nothing fires: all engines respond, no SLO error budget burns too fast, and disks have space."
            panels.table(firing, firing_columns(), none)
    with panels.panel(
        "Newest alerts", "each is sent once to every webhook of its group", [answer], key="alerts", frame=alerts
    ):
        panels.table(alerts, columns(), f"{NONE}{session.advice(HOW, QUOTA_WRITES)}", states=STATES, max_rows=16)


def firing_columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "group": "Group",
        "subject": column.TextColumn("Subject", width="large"),
        "since": panels.time_column("Since", "YYYY-MM-DD HH:mm:ss"),
    }


def columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "at": panels.time_column("Time", "YYYY-MM-DD HH:mm:ss", width=160),
        "status": "Status",
        "type": "Event",
        "severity": "Severity",
        "summary": column.TextColumn("Summary", width="large"),
        "tenant": "Tenant",
        "subject": column.TextColumn("Subject", width="medium"),
        "id": column.TextColumn("Id", width="medium"),
    }
