"""Fields, tables and dialogs of keys that several pages share.

The text of a new key is shown once, to the user who made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, path_of
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import short
from moiety_dashboard.page import Page
from moiety_dashboard.views.tenants.names import forget_names

MADE = "made key"
NEW_KEY = "new key"  # form
PLAYGROUND = "playground"  # path of the page, which all users may see
PLAYGROUND_KEY = "playground key"
GRACES = {"none": 0, "1 hour": 3600, "1 day": 86_400, "7 days": 7 * 86_400}
EXPIRIES = {"never": None, "1 day": 1, "7 days": 7, "30 days": 30, "90 days": 90, "1 year": 365}
NANO = 1_000_000_000


def nano_of(dollars: float) -> int:
    """Return the nano-dollars of an entered number of dollars, exactly as it was written."""
    return int((Decimal(str(dollars)) * NANO).to_integral_value())


def dollars_of(nano: int) -> float:
    """Return the number of dollars for a field; up to 15 digits are exact."""
    return float(Decimal(nano) / NANO)


def key_columns(*, with_user: bool) -> dict[str, Any]:
    """Return the columns of a table of keys."""
    shown: dict[str, Any] = {
        "key": "Key",
        "name": "Name",
        "for": "Project",
        "user": st.column_config.TextColumn("User", help="The user who made the key for itself"),
        "status": "Status",
        "last_used": st.column_config.TextColumn(
            "Last used", help="Start of the last request, as long as the rows of requests are kept"
        ),
        "spend": st.column_config.NumberColumn("Spend", format="dollar", help="This month, in UTC"),
        "expires": "Expires",
        "models": "Models",
        "limits": "Quotas",
        "scopes": "Scopes",
        "created": "Created",
    }
    if not with_user:
        del shown["user"]
    return shown


def show_made(page: Page) -> None:
    """Show the text of a new key until it is dismissed or tried on the playground page."""
    text = st.session_state.get(MADE)
    if text is None:
        return
    with st.container(border=True):
        st.markdown(":material/key: **Copy this key now.** It is shown only once and cannot be retrieved later.")
        st.code(text, language=None)
        left, right, _ = st.columns([1, 1, 2])
        left.button("Done", type="primary", width="stretch", on_click=panels.forget_secret, args=(MADE,))
        if right.button("Try it in the playground", width="stretch"):
            st.session_state[PLAYGROUND_KEY] = st.session_state.pop(MADE)
            session.notify("The key is set in the playground.")
            st.switch_page(page.others[PLAYGROUND])


def keep(made: Mapping[str, Any]) -> None:
    """Keep the text of a new key for the next drawing."""
    st.session_state[MADE] = made["secret"]
    panels.clear_form(NEW_KEY)
    forget_names()
    st.rerun()


def ask_terms(
    models: Sequence[str],
    *,
    only_these: bool = False,
    longest_days: int | None = None,
    caps: Mapping[str, int] | None = None,
) -> Any:
    """Draw the fields of a key's expiry, models and quotas; return them as the API takes them.

    `models` are offered, and the only ones with `only_these`. `longest_days` and `caps` are the most that a policy
    allows.
    """
    bounds = caps or {}
    left, right = st.columns(2)
    allowed = {
        label: days
        for label, days in EXPIRIES.items()
        if longest_days is None or (days is not None and days <= longest_days)
    }
    if longest_days is not None and longest_days not in allowed.values():
        allowed[f"{longest_days} days"] = longest_days  # the longest that is allowed
    expiry = left.selectbox("Expires after", list(allowed), len(allowed) - 1 if longest_days is not None else 0)
    chosen = right.multiselect("Models", list(models), accept_new_options=not only_these, placeholder="All")
    first, second, third = st.columns(3)
    limits = {
        "requests_per_minute": _cap(first, "Requests per minute", bounds.get("requests_per_minute")),
        "tokens_per_day": _cap(second, "Tokens per day", bounds.get("tokens_per_day")),
    }
    money = bounds.get("money_per_month")
    dollars = third.number_input(
        "Dollars per month",
        0.0,
        None if money is None else dollars_of(money),
        None,
        placeholder=_most(money, is_money=True),
    )
    limits["money_per_month"] = None if dollars is None else nano_of(dollars)
    days = allowed[expiry]
    body: dict[str, Any] = {"allowed_models": chosen or None}
    if days is not None and days != longest_days:  # without an expiry the gateway takes the longest
        body["expires_at"] = (datetime.now(UTC) + timedelta(days=days)).isoformat()
    given = {kind: cap for kind, cap in limits.items() if cap is not None}
    return {**body, "limits": given} if given else body


def _cap(place: Any, label: str, most: int | None) -> int | None:
    found: int | None = place.number_input(as_text(label), 0, most, None, placeholder=_most(most, is_money=False))
    return found


def _most(cap: int | None, *, is_money: bool) -> str:
    if cap is None:
        return "no quota"
    return f"max {(Decimal(cap) / NANO).normalize():f}" if is_money else f"max {short(cap)}"  # the field is narrow


def ask_change(client: AdminClient, keys: Sequence[Mapping[str, Any]], collection: Sequence[str]) -> None:
    """Draw the choice of a key to rotate or revoke; `collection` is the path of the keys in the admin API."""
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
            rotate(client, path_of(*collection, chosen, "rotate"), labels[chosen], grace)
        if right.button("Revoke", icon=":material/key_off:", width="stretch"):
            panels.ask_first(
                f"Revoke **{as_text(labels[chosen])}**? Clients that use it get 401 immediately. This cannot "
                "be undone.",
                "Revoke",
                lambda: client.change("POST", path_of(*collection, chosen, "revoke")),
                f"Key {labels[chosen]} revoked.",
            )


@st.dialog("Rotate a key")
def rotate(client: AdminClient, path: str, label: str, grace: str) -> None:
    until = "immediately" if grace == "none" else f"after {as_text(grace)}"
    st.markdown(f"Create a new key that replaces **{as_text(label)}**? The old key stops working {until}.")
    if st.button("Rotate", type="primary", key="rotate confirmed"):
        body = {"grace_s": GRACES[grace]}
        made = panels.attempt(lambda: client.change("POST", path, body), "Key rotated.")
        if made is not None:
            keep(made)
