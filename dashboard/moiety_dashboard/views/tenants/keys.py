"""A tenant's projects and keys: create, rotate, revoke. A key's text is shown once, to the user who created it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, path_of
from moiety_dashboard.escaping import as_text
from moiety_dashboard.frames.tenants import keys_frame
from moiety_dashboard.views.tenants.names import forget_names

MADE = "made key"
PLAYGROUND_KEY = "playground key"
GRACES = {"none": 0, "1 hour": 3600, "1 day": 86_400, "7 days": 7 * 86_400}


def draw(client: AdminClient, tenant: Mapping[str, Any]) -> None:
    projects = client.list("/projects", tenant_id=tenant["id"])
    keys = client.list("/keys", tenant_id=tenant["id"])
    show_made()
    frame = keys_frame(keys.data, projects.data, session.zone())
    with panels.panel("Keys", "identified by their last four characters", [keys, projects], key="keys", frame=frame):
        panels.table(frame, columns(), "No key yet. Create one below and send it with every request.")
    if not session.may("keys.write"):
        st.caption("Your role can view keys, but not create, rotate or revoke them.")
        return
    left, right = st.columns(2)
    with left:
        ask_new(client, tenant, projects.data)
    with right:
        ask_change(client, [key for key in keys.data if key["status"] == "active"])


def columns() -> dict[str, Any]:
    return {
        "key": "Key",
        "name": "Name",
        "for": "Project",
        "status": "Status",
        "models": "Models",
        "created": "Created",
        "expires": "Expires",
    }


def show_made() -> None:
    """Show the text of a new key until it is dismissed."""
    text = st.session_state.get(MADE)
    if text is None:
        return
    with st.container(border=True):
        st.markdown(":material/key: **Copy this key now.** It is shown only once and cannot be retrieved later.")
        st.code(text, language=None)
        left, right, _ = st.columns([1, 1, 2])
        if left.button("Done", type="primary", width="stretch"):
            del st.session_state[MADE]
            st.rerun()
        if right.button("Try it in the playground", width="stretch"):
            st.session_state[PLAYGROUND_KEY] = st.session_state.pop(MADE)
            session.notify("The key is set in the playground.")
            st.rerun()


def ask_new(client: AdminClient, tenant: Mapping[str, Any], projects: list[dict[str, Any]]) -> None:
    names = [project["name"] for project in projects]
    with st.form("new key", border=True):
        st.markdown("**New key**")
        name = st.text_input("Key name", placeholder="website")
        project = st.selectbox(
            "Project", names or ["default"], accept_new_options=True, help="A new name creates a project"
        )
        if st.form_submit_button("Create key", type="primary"):
            made = panels.attempt(lambda: create_key(client, tenant, projects, project, name), "Key created.")
            if made is not None:
                keep(made)


def create_key(
    client: AdminClient, tenant: Mapping[str, Any], projects: list[dict[str, Any]], project: str, name: str
) -> Any:
    """Create a key of a project, and the project if there is none of that name."""
    found = next((one["id"] for one in projects if one["name"] == project), None)
    if found is None:
        found = client.change("POST", "/projects", {"tenant_id": tenant["id"], "name": project})["id"]
    return client.change("POST", "/keys", {"name": name, "project_id": found})


def keep(made: Mapping[str, Any]) -> None:
    st.session_state[MADE] = made["secret"]
    forget_names()
    st.rerun()


def ask_change(client: AdminClient, keys: list[dict[str, Any]]) -> None:
    with st.container(border=True):
        st.markdown("**Rotate or revoke**")
        if not keys:
            st.caption("There is no active key.")
            return
        labels = {key["id"]: f"{key['name']} …{key['hint']}" for key in keys}
        chosen = st.selectbox("Key", list(labels), format_func=lambda key_id: labels[key_id])
        grace = st.selectbox("Grace period of the old key", list(GRACES), 2)
        left, right = st.columns(2)
        if left.button("Rotate", icon=":material/autorenew:", width="stretch"):
            rotate(client, chosen, labels[chosen], grace)
        if right.button("Revoke", icon=":material/key_off:", width="stretch"):
            panels.ask_first(
                f"Revoke **{as_text(labels[chosen])}**? Clients that use it get 401 immediately. This cannot "
                "be undone.",
                "Revoke",
                lambda: client.change("POST", path_of("keys", chosen, "revoke")),
                f"Key {labels[chosen]} revoked.",
            )


@st.dialog("Rotate a key")
def rotate(client: AdminClient, key_id: str, label: str, grace: str) -> None:
    until = "immediately" if grace == "none" else f"after {as_text(grace)}"
    st.markdown(f"Create a new key that replaces **{as_text(label)}**? The old key stops working {until}.")
    if st.button("Rotate", type="primary", key="rotate confirmed"):
        body = {"grace_s": GRACES[grace]}
        made = panels.attempt(lambda: client.change("POST", path_of("keys", key_id, "rotate"), body), "Key rotated.")
        if made is not None:
            keep(made)
