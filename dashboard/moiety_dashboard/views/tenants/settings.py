"""A tenant's class, weight and name, and its suspension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, path_of
from moiety_dashboard.escaping import as_text
from moiety_dashboard.views.tenants.names import forget_names


def draw(client: AdminClient, tenant: Mapping[str, Any]) -> None:
    if not session.may("tenants.write"):
        st.caption("Only owners and operators can change a tenant's class, weight and status.")
        return
    classes = [terms["name"] for terms in client.get("/classes").data["data"]]
    with st.form(f"settings {tenant['id']}", border=True):
        first, second, third = st.columns(3)
        at = classes.index(tenant["service_class"]) if tenant["service_class"] in classes else 0
        edited = {
            "name": first.text_input("Name", tenant["name"]),
            "service_class": second.selectbox("Highest class", classes, at),
            "weight": third.number_input("Weight", 0.001, 1000.0, float(tenant["weight"])),
        }
        if st.form_submit_button("Save", type="primary"):
            save(client, tenant, {name: value for name, value in edited.items() if value != tenant[name]})
    suspended = tenant["status"] == "suspended"
    if suspended and st.button("Resume", icon=":material/play_arrow:"):
        set_status(client, tenant, "active")
        st.rerun()
    if not suspended and st.button("Suspend", icon=":material/block:"):
        panels.ask_first(
            f"Suspend **{as_text(tenant['name'])}**? All its keys, including those of its administrators, stop working "
            "within two seconds. Running requests finish.",
            "Suspend",
            lambda: set_status(client, tenant, "suspended"),
            f"Tenant {tenant['name']} suspended.",
        )


def save(client: AdminClient, tenant: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    if not changes:
        st.info("No changes to save.")
        return
    done = f"Tenant {tenant['name']} saved; the change applies from the next request."
    if panels.attempt(lambda: client.change("PATCH", path_of("tenants", tenant["id"]), changes), done) is not None:
        forget_names()
        st.rerun()


def set_status(client: AdminClient, tenant: Mapping[str, Any], status: str) -> Any:
    return client.change("PATCH", path_of("tenants", tenant["id"]), {"status": status})
