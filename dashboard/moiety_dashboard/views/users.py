"""Users of tenants and of the deployment: invitations, roles, states, and the policy for keys of developers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, path_of
from moiety_dashboard.escaping import as_text, show_unseen
from moiety_dashboard.frames.tenants import limits_text, users_frame
from moiety_dashboard.page import Page
from moiety_dashboard.views.key_forms import dollars_of, nano_of
from moiety_dashboard.views.tenants.keys import priced_models

MADE = "made invitation"
INVITATION = "invitation"  # form
ALL_TENANTS = ""  # in place of a tenant's id
ROLES_OF_TENANT = ("developer", "viewer", "tenant-admin")
ROLES_OF_ALL = ("viewer", "operator", "owner")
EXPLAINED = {
    "developer": "sees its projects and the models, and makes keys for itself",
    "viewer": "reads everything, and changes nothing",
    "tenant-admin": "manages the projects, keys and users of the tenant",
    "operator": "runs the deployment: engines, classes, tenants, prices",
    "owner": "may do everything",
}


def draw(page: Page) -> None:
    panels.head("Users", "People who sign in through the identity provider, and what they may do")
    with page.asking() as client:
        users = client.list("/users")
        tenants = {tenant["id"]: tenant["name"] for tenant in client.list("/tenants").data}
        projects = client.list("/projects").data
        names = tenants | {project["id"]: project["name"] for project in projects}
        frame = users_frame(users.data, names, session.zone())
        with panels.panel("Users", "oldest first", [users], key="users", frame=frame):
            none = f"No user yet.{session.advice('Invite one below.', 'users.write')}"
            panels.table(frame, columns(), none, max_rows=12)
        show_made()  # beside the form, which is below the edge of most windows
        if not panels.may_change("users.write", "users", "invite or change"):
            return
        left, right = st.columns(2)
        with left:
            ask_invitation(client, tenants, projects)
        with right:
            ask_change(client, users.data, names)
        draw_policy(client, tenants)


def columns() -> dict[str, Any]:
    return {
        "email": "Email",
        "name": "Name",
        "role": "Role",
        "tenant": "Tenant",
        "projects": "Projects",
        "state": "State",
        "accepted": "Accepted",
        "invitation": "Invitation until",
        "created": "Created",
    }


def show_made() -> None:
    """Show a new invitation until it is dismissed."""
    note = ":material/mail: **Send this link to the user.** It is shown only once, and is good for one sign-in."
    panels.show_once(MADE, note, _link_of, wraps=True)


def _link_of(code: str) -> str:
    base = (st.context.url or "").partition("?")[0].removesuffix("/users").rstrip("/")
    return f"{base}/?{session.INVITATION}={code}"


def ask_invitation(client: AdminClient, tenants: Mapping[str, str], projects: list[dict[str, Any]]) -> None:
    """Draw the fields of a new user; the choice of roles and projects follows the tenant."""
    with st.container(border=True):
        st.markdown("**Invite a user**")
        form = panels.form_key(INVITATION)
        email = st.text_input("Email address", placeholder="ada@example.com", key=f"{form} email")
        name = st.text_input("Name", placeholder="Ada", key=f"{form} name")
        places = {tenant_id: show_unseen(tenant) for tenant_id, tenant in tenants.items()}
        if session.may("admin_users.write"):
            places[ALL_TENANTS] = "All tenants"
        tenant_id = st.selectbox("Tenant", list(places), format_func=lambda one: places[one])
        if tenant_id is None:
            st.caption("There is no tenant yet.")
            return
        roles = [one for one in (ROLES_OF_TENANT if tenant_id else ROLES_OF_ALL) if _may_give(one, tenant_id)]
        role = st.selectbox("Role", roles)
        st.caption(as_text(f"A user with this role {EXPLAINED[role]}."))
        body: dict[str, Any] = {"email": email.strip(), "name": name.strip(), "role": role}
        if tenant_id:
            body["tenant_id"] = tenant_id
        if role == "developer":
            own = {one["id"]: one["name"] for one in projects if one["tenant_id"] == tenant_id}
            chosen = st.multiselect(
                "Projects", list(own), format_func=lambda one: own[one], placeholder="All", key=f"projects {tenant_id}"
            )
            body["project_ids"] = chosen or None
        if st.button("Invite", type="primary", icon=":material/mail:"):
            made = panels.attempt(lambda: invite(client, body), "Invitation made.")
            if made is not None:
                panels.clear_form(INVITATION)
                _keep(made)


def _may_give(role: str, tenant_id: str) -> bool:
    """Return whether the page offers a role. This is only for display: the gateway checks again."""
    return session.may("admin_users.write") or (bool(tenant_id) and role != "tenant-admin")


def invite(client: AdminClient, body: Mapping[str, Any]) -> Any:
    """Create the user, and make its invitation."""
    user = client.change("POST", "/users", body)
    return client.change("POST", path_of("users", user["id"], "invitation"))


def _keep(made: Mapping[str, Any]) -> None:
    st.session_state[MADE] = made["secret"]
    st.rerun()


def ask_change(client: AdminClient, users: list[dict[str, Any]], names: Mapping[str, str]) -> None:
    with st.container(border=True):
        st.markdown("**Change a user**")
        if not users:
            st.caption("There is no user yet.")
            return
        by_id = {user["id"]: user for user in users}
        labels = {
            user["id"]: show_unseen(f"{user['email']} ({names.get(user['tenant_id'] or '', 'all tenants')})")
            for user in users
        }
        chosen = st.selectbox("User", list(labels), format_func=lambda user_id: labels[user_id])
        user, path = by_id[chosen], path_of("users", chosen)
        invites = user["state"] != "active"
        *first, middle, right = st.columns(3 if invites else 2)
        if invites and first[0].button("New invitation", width="stretch"):
            made = panels.attempt(lambda: client.change("POST", f"{path}/invitation"), "Invitation made.")
            if made is not None:
                _keep(made)
        if user["state"] == "disabled":
            if middle.button("Enable", icon=":material/person_check:", width="stretch"):
                done = panels.attempt(lambda: client.change("PATCH", path, {"state": "active"}), "User enabled.")
                if done is not None:
                    st.rerun()
        elif middle.button("Disable", icon=":material/person_off:", width="stretch"):
            panels.ask_first(
                f"Disable **{as_text(labels[chosen])}**? Its open sessions and its keys are refused from now on, until "
                "it is enabled again.",
                "Disable",
                lambda: client.change("PATCH", path, {"state": "disabled"}),
                "User disabled.",
            )
        if right.button("Delete", icon=":material/delete:", width="stretch"):
            panels.ask_deletion(
                client,
                path,
                f"Delete **{as_text(labels[chosen])}**? Its keys are revoked. This cannot be undone.",
                "User deleted.",
            )


def draw_policy(client: AdminClient, tenants: Mapping[str, str]) -> None:
    """Draw the policies of tenants for keys of their developers, and a form for one of them."""
    policies, priced = client.list("/key-policies"), priced_models(client)
    by_tenant = {policy["tenant_id"]: policy for policy in policies.data}
    with panels.panel(
        "Key policy", "which keys the developers of a tenant make for themselves", [policies], key="policies"
    ):
        if not tenants:
            st.caption("There is no tenant yet.")
            return
        tenant_id = st.selectbox(
            "Tenant of the policy", list(tenants), format_func=lambda one: show_unseen(tenants[one])
        )
        known: Mapping[str, Any] = by_tenant.get(tenant_id) or {}
        with st.form(f"policy {tenant_id}", border=False):
            st.caption(as_text(policy_text(tenants[tenant_id], known)))
            makes = st.toggle("Developers make keys", value=bool(known.get("makes_keys", False)))
            first, second, third = st.columns(3)
            max_keys = first.number_input(
                "Keys per developer", 0, 1000, known.get("max_keys", 5), help="Largest number of active keys"
            )
            max_days = second.number_input(
                "Longest lifetime, days", 1, 3650, known.get("max_days"), placeholder="no bound"
            )
            allowed = known.get("allowed_models") or []
            models = third.multiselect(
                "Models",
                sorted({*priced, *allowed}),
                allowed,
                accept_new_options=True,
                placeholder="All",
            )
            limits = _ask_caps(known.get("limits") or {})
            if known.get("limits"):
                st.caption(f"Quotas of each new key: {as_text(limits_text(known['limits']))}.")
            if st.form_submit_button("Save policy", type="primary"):
                body = {
                    "tenant_id": tenant_id,
                    "makes_keys": makes,
                    "max_keys": max_keys,
                    "max_days": max_days,
                    "allowed_models": models or None,
                    "limits": limits,
                }
                if panels.attempt(lambda: client.change("PUT", "/key-policies", body), "Policy saved.") is not None:
                    st.rerun()


def policy_text(tenant: str, policy: Mapping[str, Any]) -> str:
    """Return the state of a tenant's policy, which also says whose form is shown."""
    if not policy:
        return f"{tenant} has no policy yet: its developers make no keys."
    if not policy["makes_keys"]:
        return f"Policy of {tenant}: its developers make no keys."
    return f"Policy of {tenant}: its developers make keys within these bounds."


def _ask_caps(known: Mapping[str, int]) -> dict[str, int]:
    """Return the highest quotas of a key; kinds without a field stay as they are."""
    first, second, third = st.columns(3)
    rate = first.number_input("Requests per minute", 0, None, known.get("requests_per_minute"), placeholder="no quota")
    tokens = second.number_input("Tokens per day", 0, None, known.get("tokens_per_day"), placeholder="no quota")
    money = known.get("money_per_month")
    before = None if money is None else dollars_of(money)
    dollars = third.number_input("Dollars per month", 0.0, None, before, placeholder="no quota")
    asked = {
        "requests_per_minute": rate,
        "tokens_per_day": tokens,
        "money_per_month": money if dollars == before else None if dollars is None else nano_of(dollars),
    }
    return {kind: cap for kind, cap in {**known, **asked}.items() if cap is not None}
