"""The script that Streamlit runs: page layout, user sign-in, and the error for an absent gateway."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from moiety_dashboard import panels, session
from moiety_dashboard.client import ApiRefused, GatewayUnreachable, KeyRefused, RoleRefused
from moiety_dashboard.escaping import as_text
from moiety_dashboard.page import Page
from moiety_dashboard.settings import DashboardSettings, read_settings, without_password
from moiety_dashboard.views import PAGES, View

ICON = Path(__file__).parent / "icon.svg"  # a named icon would be fetched from another host


def main() -> None:
    settings = read_settings(sys.argv[1:])
    st.set_page_config(page_title="Moiety", page_icon=str(ICON), layout="wide", initial_sidebar_state=230)
    st.html(panels.STYLE)
    st.html(panels.MARK_HIDDEN_COLUMNS, unsafe_allow_javascript=True)
    credential = session.credential()
    why, is_known = check_user(settings, credential)
    page = Page(settings, credential) if credential is not None and is_known else None
    views = [view for view in PAGES if page is None or view.needs is None or session.may(view.needs)]
    # keep the address of a signed-out user, so that the link still opens its page after sign-in
    shown = {view.path: st_page(view, page, is_first=view is views[0]) for view in views}
    chosen = st.navigation(list(shown.values()), position="hidden" if page is None else "sidebar", expanded=True)
    if page is not None:
        page.others.update(shown)
        session.draw_ticket()
        draw_caller(settings)
        session.show_notice()
        if session.ANSWERED_INVITATION in st.session_state:
            st.html(session.DROP_INVITATION, unsafe_allow_javascript=True)
        chosen.run()
    elif credential is not None and why is None:
        session.ask_about_invitation(session.client_of(settings, credential))
    elif credential is not None and session.credential() is not None:
        wait_for_gateway(settings, str(why))
    else:
        session.draw_sign_in(settings, why)


def check_user(settings: DashboardSettings, credential: str | None) -> tuple[str | None, bool]:
    """Return why the gateway is not usable, and whether it accepts the user; sign out a user that it rejects.

    A user that is to be asked about an invitation first is not checked yet.
    """
    place = st.empty()  # always, so that the following elements keep their positions
    if credential is None:
        return None, False
    if session.CALLER in st.session_state:
        return None, True
    try:
        with place, st.spinner("Waiting for the gateway", show_time=True):
            if not session.probe_gateway(settings):
                raise GatewayUnreachable(f"The gateway at {without_password(settings.gateway_url)} does not respond")
            if session.has_open_invitation(credential):
                return None, False
            session.caller(session.client_of(settings, credential))
    except GatewayUnreachable as exc:
        return str(exc), False
    except (KeyRefused, RoleRefused, ApiRefused) as exc:
        session.sign_out()
        return f"The gateway rejected the sign-in: {exc}", False
    return None, True


def st_page(view: View, page: Page | None, *, is_first: bool) -> StreamlitPage:
    """Return a page of the navigation, of which the first is shown at the start; it never runs without a known user."""

    def run() -> None:
        assert page is not None, "only signed-in users reach a page"
        view.draw(page)

    run.__name__ = view.path  # Streamlit identifies pages by this name
    return st.Page(run, title=view.title, icon=view.icon, url_path=view.path, default=is_first)


def wait_for_gateway(settings: DashboardSettings, why: str) -> None:
    """Say that the gateway does not respond, and open the page as soon as it does."""
    st.error(f"{as_text(why)}. This page opens as soon as it does.", icon=":material/cloud_off:")

    def ask_again() -> None:
        if session.probe_gateway(settings):
            st.rerun()

    st.fragment(ask_again, run_every=settings.refresh_s)()


def draw_connection(settings: DashboardSettings) -> None:
    """Show whether the gateway responds, on pages without figures, too."""
    if session.probe_gateway(settings):
        st.badge("Gateway responds", icon=":material/cloud_done:", color="green")
    else:
        st.badge("Gateway does not respond", icon=":material/cloud_off:", color="red")


def draw_caller(settings: DashboardSettings) -> None:
    """Show the state of the gateway and the signed-in user at the foot of the navigation."""
    me = st.session_state[session.CALLER]
    with st.sidebar:
        st.fragment(draw_connection, run_every=settings.refresh_s)(settings)
        session.draw_tenants()
        whose = me[session.TENANT_NAME] or ("one tenant" if me["tenant_id"] else "all tenants")
        st.caption(f"Signed in as **{as_text(me['role'])}** of {as_text(whose)}")
        st.button("Sign out", icon=":material/logout:", width="stretch", on_click=session.sign_out)


main()
