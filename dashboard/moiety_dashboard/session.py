"""The user's session: the browser's credential and the gateway's answer about it, kept only in the server's memory."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import streamlit as st

from moiety_dashboard.browser_sessions import COOKIE, PATH, TICKET, browser_sessions
from moiety_dashboard.client import CONNECT_TIMEOUT_S, TIMEOUT_S, AdminClient, ApiError, GatewayUnreachable
from moiety_dashboard.escaping import as_text, show_unseen
from moiety_dashboard.gateway_state import Drawing, GatewayState
from moiety_dashboard.settings import DashboardSettings, without_password

CREDENTIAL = "credential"
CALLER = "caller"
TENANT_NAME = "tenant_name"  # in the caller
NOTICE = "notice"
PENDING_TICKET = "ticket"
SESSION_ID = "session id"
STATE = "gateway state"
TENANT_ID = "tenant of the session"
INVITATION = "invitation"  # parameter of the page's address
INVITATION_COOKIE = "moiety_invitation"
ANSWERED_INVITATION = "answered invitation"
KEY_PREFIX = "mty_"
DEPLOYS = "engines.sleep"  # an action of the roles that set up gateways and engines

_INVITATION = re.compile(r"inv_[A-Za-z0-9_.]{10,190}", re.ASCII)
# The sign-in at the identity provider leads back to the page's address without its parameters.
KEEP_INVITATION = """
<script>
  const code = new URLSearchParams(location.search).get("invitation");
  if (code && /^inv_[A-Za-z0-9_.]{10,190}$/.test(code))
    document.cookie = `moiety_invitation=${code}; Max-Age=900; Path=/; SameSite=Lax`;
</script>
"""
DROP_INVITATION = """
<script>document.cookie = "moiety_invitation=; Max-Age=0; Path=/; SameSite=Lax";</script>
"""


@st.cache_resource
def connections() -> httpx.Client:
    """Return the HTTP client shared by all sessions: it has no credential, and making one is slower than a request."""
    return httpx.Client(timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S))


def client_of(settings: DashboardSettings, credential: str, drawing: Drawing | None = None) -> AdminClient:
    return AdminClient(settings.gateway_url, credential, connections(), drawing, st.session_state.get(TENANT_ID))


def gateway_state() -> GatewayState:
    """Return what this session knows of the gateway."""
    state: GatewayState = st.session_state.setdefault(STATE, GatewayState())
    return state


def probe_gateway(settings: DashboardSettings) -> bool:
    """Return whether the gateway responds; takes two seconds at most."""
    return gateway_state().probe(connections(), settings.gateway_url)


def credential() -> str | None:
    """Return the entered key, or the token from the identity provider; None for a signed-out user.

    A reloaded page has a new session, which gets the key by the browser's cookie.
    """
    entered: str | None = st.session_state.get(CREDENTIAL)
    if entered is None and (session_id := st.context.cookies.get(COOKIE)) is not None:
        entered = browser_sessions().credential_of(session_id)
        if entered is not None:
            st.session_state[CREDENTIAL], st.session_state[SESSION_ID] = entered, session_id
    if entered is not None or not has_provider() or not st.user.is_logged_in:
        return entered
    tokens: Mapping[str, Any] = getattr(st.user, "tokens", {})
    token = tokens.get("access") or tokens.get("id")
    return None if token is None else str(token)


def has_provider() -> bool:
    return st.secrets.load_if_toml_exists() and "auth" in st.secrets


def caller(client: AdminClient) -> Mapping[str, Any]:
    """Return the gateway's view of this user, requested once per session. Raises ApiError."""
    if CALLER not in st.session_state:
        st.session_state[CALLER] = read_caller(client)
    found: Mapping[str, Any] = st.session_state[CALLER]
    return found


def read_caller(client: AdminClient) -> Mapping[str, Any]:
    """Return the gateway's view of a user, with the name of the tenant. Raises ApiError."""
    me = client.get("/caller").data
    names = {role["tenant_id"]: role["tenant_name"] for role in me["roles"]}  # a key has none
    if me["tenant_id"] is not None and me["tenant_id"] not in names and "tenants.read" in me["may"]:
        names |= {tenant["id"]: tenant["name"] for tenant in client.list("/tenants").data}
    return {**me, TENANT_NAME: names.get(me["tenant_id"])}


def pending_invitation() -> str | None:
    """Return the invitation in the page's address, or the one that was there before the sign-in."""
    found = str(st.query_params.get(INVITATION) or st.context.cookies.get(INVITATION_COOKIE) or "")
    if not _INVITATION.fullmatch(found) or found == st.session_state.get(ANSWERED_INVITATION):
        return None
    return found


def has_open_invitation(credential: str) -> bool:
    """Return whether this user is still to be asked about an invitation, which keys cannot accept."""
    return pending_invitation() is not None and not credential.startswith(KEY_PREFIX)


def ask_about_invitation(client: AdminClient) -> None:
    """Ask whether to accept the pending invitation. It stays pending until it is accepted or declined."""
    code = pending_invitation()
    assert code is not None, "asked only while there is an invitation"
    _, middle, _ = st.columns([1, 1.4, 1])
    with middle:
        st.title("Invitation", anchor=False)
        st.markdown("Accept it only if you expect it: this sign-in then becomes the invited user of that organization.")
        yes, no = st.columns(2)
        if yes.button("Accept the invitation", type="primary", width="stretch"):
            try:
                client.change("POST", "/invitations/accept", {"invitation": code})
            except ApiError as exc:
                st.error(f"The invitation was not accepted: {as_text(exc)}", icon=":material/error:")
            else:
                _close_invitation(code)
                notify("The invitation is accepted.")
                st.rerun()
        if no.button("Decline", width="stretch"):
            _close_invitation(code)
            st.rerun()


def _close_invitation(code: str) -> None:
    st.session_state[ANSWERED_INVITATION] = code
    st.query_params.pop(INVITATION, None)


def draw_tenants() -> None:
    """Let a user with several roles choose the tenant to work in."""
    me = st.session_state[CALLER]
    roles = {role["tenant_id"]: f"{role['tenant_name'] or 'all tenants'} ({role['role']})" for role in me["roles"]}
    if len(roles) < 2:
        return
    ids = list(roles)
    at = ids.index(me["tenant_id"]) if me["tenant_id"] in ids else 0
    chosen = st.selectbox("Working in", ids, at, format_func=lambda tenant_id: show_unseen(roles[tenant_id]))
    if chosen != me["tenant_id"]:
        kept = {
            name: st.session_state[name]
            for name in (CREDENTIAL, SESSION_ID, PENDING_TICKET)
            if name in st.session_state
        }
        st.session_state.clear()  # with everything that was read for the other tenant
        st.session_state.update(kept)
        st.session_state[TENANT_ID] = chosen
        st.query_params.clear()
        st.rerun()


def may(action: str) -> bool:
    """Return whether the role allows the action. This is only for display: the gateway checks again."""
    return action in st.session_state[CALLER]["may"]


def advice(text: str, actions: str | Sequence[str]) -> str:
    """Return a sentence about what to do next, for a role that may do one of the actions; otherwise nothing."""
    return f" {text}" if any(map(may, [actions] if isinstance(actions, str) else actions)) else ""


def is_of_one_tenant() -> bool:
    return st.session_state[CALLER]["tenant_id"] is not None


def sign_out() -> None:
    """Delete all data of this session, including what it showed."""
    with_provider = CREDENTIAL not in st.session_state
    answered = st.session_state.get(ANSWERED_INVITATION)
    if SESSION_ID in st.session_state:
        browser_sessions().end(st.session_state[SESSION_ID])
    st.session_state.clear()
    if answered is not None:
        st.session_state[ANSWERED_INVITATION] = answered
    if with_provider:
        st.logout()


def draw_sign_in(settings: DashboardSettings, why: str | None = None) -> None:
    """Draw the sign-in page."""
    _, middle, _ = st.columns([1, 1.4, 1])
    with middle:
        st.title("Moiety", anchor=False)
        st.caption(f"Administration of the gateway at {as_text(without_password(settings.gateway_url))}")
        if why is not None:
            st.error(as_text(why), icon=":material/key_off:")
        if pending_invitation() is not None:
            st.info("You are invited. Sign in with your identity provider to accept.", icon=":material/mail:")
            st.html(KEEP_INVITATION, unsafe_allow_javascript=True)
        if has_provider() and st.button("Sign in with your identity provider", type="primary", width="stretch"):
            st.login()
        with st.form("sign in", border=True):
            entered = st.text_input("Administrator key", type="password", autocomplete="off", placeholder="mty_…")
            st.caption(
                "`moiety serve` prints a key at its first start and stores it in `.moiety/keys.json`. The key is sent "
                "to the gateway with every request, and kept only in the dashboard's memory, for 12 hours at most."
            )
            if st.form_submit_button("Sign in", type="primary", width="stretch") and entered:
                _try(settings, entered.strip())


def _try(settings: DashboardSettings, entered: str) -> None:
    known: dict[str, Any] = {}
    try:
        if not has_open_invitation(entered):  # otherwise it may be no user yet
            known[CALLER] = read_caller(client_of(settings, entered))
    except GatewayUnreachable as exc:
        st.error(f"{as_text(exc)}. Check that it is running.", icon=":material/cloud_off:")
    except ApiError as exc:
        st.error(f"The gateway rejected the key: {as_text(exc)}", icon=":material/key_off:")
    else:
        st.session_state.update({CREDENTIAL: entered, **known})
        st.session_state[SESSION_ID], st.session_state[PENDING_TICKET] = browser_sessions().start(entered)
        st.rerun()


def draw_ticket() -> None:
    """Let the browser redeem the ticket of a new sign-in, for the cookie with which a reload stays signed in."""
    place = st.empty()  # also without a ticket, so that the following elements keep their positions
    ticket: str | None = st.session_state.get(PENDING_TICKET)
    if ticket is None:
        return
    if browser_sessions().is_unredeemed(ticket):
        place.html(f'<img src=".{PATH}?{TICKET}={html.escape(ticket)}" alt="" width="0" height="0">')
    else:
        del st.session_state[PENDING_TICKET]


def notify(text: str) -> None:
    """Show the text once, after the next redraw."""
    st.session_state[NOTICE] = text


def zone() -> ZoneInfo:
    """Return the browser's time zone, in which its charts are drawn too; UTC if it sends none that is known here.

    Every page shows which one it is.
    """
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (OSError, ValueError, KeyError):  # the browser may send anything
        return ZoneInfo("UTC")


def show_notice() -> None:
    text = st.session_state.pop(NOTICE, None)
    if text is not None:
        st.toast(as_text(text), icon=":material/check_circle:")
