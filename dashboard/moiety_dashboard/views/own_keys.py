"""Self-service of a user: its projects with their usage and quotas, and the keys that it makes for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import streamlit as st

from moiety_dashboard import charts, colours, panels, session
from moiety_dashboard.client import AdminClient
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import dollars, short
from moiety_dashboard.frames.catalogue import names_for_requests
from moiety_dashboard.frames.limits import quotas_frame
from moiety_dashboard.frames.tenants import keys_frame, limits_text, own_projects_frame, project_days_frame
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.columns import limit_columns
from moiety_dashboard.views.key_forms import NEW_KEY, ask_change, ask_terms, keep, key_columns, show_made
from moiety_dashboard.views.windows import DAY, Window

MONTH = Window("30 d", 30 * DAY, DAY)


def draw(page: Page) -> None:
    page.live(draw_live, slower=2)
    with page.asking() as client:
        me = client.get("/me")
        projects = client.get("/me/projects")
        draw_keys(page, client, client.list("/me/keys"), projects.data["data"], me.data)
        draw_projects(client, projects, projects.data["data"])


def draw_live(client: AdminClient) -> None:
    panels.head("My keys", "Your projects, their usage and quotas, and the keys that you make for yourself")
    me = client.get("/me")
    projects = client.get("/me/projects")
    rows = projects.data["data"]
    months = [one["month"] for one in rows if one["month"] is not None]
    cost, requests = (sum(month[name] for month in months) for name in ("cost_nanodollars", "requests"))
    policy = me.data["key_policy"]
    most = f"at most {policy['max_keys']}" if makes_keys(policy) else "none can be made"
    panels.tiles(
        [
            Tile("Projects", short(len(rows)), "that you reach"),
            Tile("Requests", short(requests), "of your projects, this month"),
            Tile("Cost", dollars(cost), "of your projects, this month"),
            Tile("Active keys", short(me.data["num_active_keys"]), most),
        ],
        [me, projects],
    )


def makes_keys(policy: Mapping[str, Any] | None) -> bool:
    return policy is not None and bool(policy["makes_keys"])


def draw_keys(
    page: Page, client: AdminClient, keys: Any, projects: list[dict[str, Any]], me: Mapping[str, Any]
) -> None:
    frame = keys_frame(keys.data, projects, session.zone())
    with panels.panel("Your keys", "identified by their last four characters", [keys], key="own-keys", frame=frame):
        panels.table(frame, key_columns(with_user=False), "You have no key yet.")
    show_made(page)
    policy = me["key_policy"]
    left, right = st.columns([3, 2])
    with left:
        if policy is None or not makes_keys(policy):
            st.info("Your tenant does not let its users make keys. Ask its administrator for a key.")
        elif me["num_active_keys"] >= policy["max_keys"]:
            most = f"You have {me['num_active_keys']:,d} active keys, and your tenant allows {policy['max_keys']:,d}."
            st.info(f"{most} Revoke one to make another.")
        elif not projects:
            st.info("Your tenant has no project yet. Ask its administrator for one.")
        else:
            served = names_for_requests(client.get("/models").data["data"])
            ask_new(client, projects, policy, served)
    with right:
        ask_change(client, [key for key in keys.data if key["status"] == "active"], ("me", "keys"))


def ask_new(
    client: AdminClient, projects: list[dict[str, Any]], policy: Mapping[str, Any], served: Sequence[str]
) -> None:
    """Draw the form of a new key. The models that are `served` are offered if the policy names none."""
    names = {project["id"]: project["name"] for project in projects}
    with st.form(panels.form_key(NEW_KEY), border=True):
        st.markdown("**New key**")
        left, right = st.columns(2)
        name = left.text_input("Key name", placeholder="laptop")
        project = right.selectbox("Project", list(names), format_func=lambda project_id: names[project_id])
        allowed = policy["allowed_models"]
        terms = ask_terms(
            served if allowed is None else allowed,
            only_these=allowed is not None,
            longest_days=policy["max_days"],
            caps=policy["limits"],
        )
        if policy["limits"]:
            st.caption(f"Without other values, the key gets these quotas: {as_text(limits_text(policy['limits']))}.")
        if st.form_submit_button("Make key", type="primary"):
            body = {"name": name, "project_id": project, **terms}
            made = panels.attempt(lambda: client.change("POST", "/me/keys", body), "Key made.")
            if made is not None:
                keep(made)


def draw_projects(client: AdminClient, projects: Any, rows: list[dict[str, Any]]) -> None:
    column = st.column_config
    frame = own_projects_frame(rows)
    with panels.panel("Projects", "this month, in UTC", [projects], key="own-projects", frame=frame):
        columns = {
            "project": "Project",
            "requests": panels.count_column("Requests"),
            "rejected": panels.count_column("Rejected"),
            "tokens": panels.count_column("Tokens"),
            "cost": column.NumberColumn("Cost", format="dollar"),
        }
        panels.table(frame, columns, "Your tenant has no project yet.")
    quotas = [quota for project in rows for quota in project["quotas"]]
    names = {project["id"]: project["name"] for project in rows}
    limits = quotas_frame(quotas, names, {}, datetime.now(UTC))
    with panels.panel("Quotas", "of your projects", [projects], key="own-quotas", frame=limits):
        shown = {name: one for name, one in limit_columns().items() if name not in ("lasts", "reserved")}
        panels.table(limits, shown, "Your projects have no quotas of their own.")
    span = MONTH.span()
    usage = client.get("/me/usage", group_by="project,day", since=span.since.isoformat(), until=span.until.isoformat())
    days = project_days_frame(usage.data["data"])
    inks = dict(zip(days["name"].drop_duplicates(), colours.TENANTS, strict=False))
    with panels.panel("Tokens", "by project and day, last 30 days", [usage], key="own-usage", frame=days):
        figure = charts.Figure("tokens", "tokens")
        empty = "Your projects sent no request in the last 30 days."
        panels.draw(
            lambda: charts.stacked(days, figure, "name", inks, span, width_px=charts.WHOLE_PX),
            days,
            empty,
            "own usage chart",
        )
