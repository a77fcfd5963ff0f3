"""A tenant's projects and keys: create, rotate, revoke. A key's text is shown once, to the user who created it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient
from moiety_dashboard.frames.tenants import keys_frame
from moiety_dashboard.page import Page
from moiety_dashboard.views.key_forms import NEW_KEY, ask_change, ask_terms, keep, key_columns, show_made


def draw(page: Page, client: AdminClient, tenant: Mapping[str, Any]) -> None:
    projects = client.list("/projects", tenant_id=tenant["id"])
    keys = client.list("/keys", tenant_id=tenant["id"], details="true")
    users = client.list("/users", tenant_id=tenant["id"]).data if session.may("users.read") else []
    frame = keys_frame(keys.data, projects.data, session.zone(), users)
    note = "identified by their last four characters; spend of this month"
    with panels.panel("Keys", note, [keys, projects], key="keys", frame=frame):
        columns = key_columns(with_user=bool(frame["user"].notna().any()))
        how = session.advice("Create one below and send it with every request.", "keys.write")
        panels.table(frame, columns, f"No key yet.{how}")
    show_made(page)
    if not panels.may_change("keys.write", "keys", "create, rotate or revoke"):
        return
    left, right = st.columns([3, 2])
    with left:
        ask_new(client, tenant, projects.data)
    with right:
        ask_change(client, [key for key in keys.data if key["status"] == "active"], ("keys",))


def ask_new(client: AdminClient, tenant: Mapping[str, Any], projects: list[dict[str, Any]]) -> None:
    names = [project["name"] for project in projects]
    with st.form(panels.form_key(NEW_KEY), border=True):
        st.markdown("**New key**")
        left, right = st.columns(2)
        name = left.text_input("Key name", placeholder="website")
        project = right.selectbox(
            "Project", names or ["default"], accept_new_options=True, help="A new name creates a project"
        )
        terms = ask_terms(priced_models(client))
        if st.form_submit_button("Create key", type="primary"):
            made = panels.attempt(lambda: create_key(client, tenant, projects, project, name, terms), "Key created.")
            if made is not None:
                keep(made)


def priced_models(client: AdminClient) -> list[str]:
    """Return the models with a price, which most keys are for; others can be entered."""
    return sorted({price["model"] for price in client.get("/prices").data["data"]})


def create_key(
    client: AdminClient,
    tenant: Mapping[str, Any],
    projects: list[dict[str, Any]],
    project: str,
    name: str,
    terms: Mapping[str, Any],
) -> Any:
    """Create a key of a project, and the project if there is none of that name."""
    found = next((one["id"] for one in projects if one["name"] == project), None)
    if found is None:
        found = client.change("POST", "/projects", {"tenant_id": tenant["id"], "name": project})["id"]
    return client.change("POST", "/keys", {"name": name, "project_id": found, **terms})
