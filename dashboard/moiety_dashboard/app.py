"""The script that Streamlit runs: the frame around the pages, who looks, and what to say when the gateway is not
there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, ApiRefused, GatewayAway, KeyRefused, RoleRefused
from moiety_dashboard.page import Page
from moiety_dashboard.settings import DashboardSettings, read_settings
from moiety_dashboard.views import PAGES, View

ICON = Path(__file__).parent / "icon.svg"  # a named one would be fetched from elsewhere


def main() -> None:
    settings = read_settings(sys.argv[1:])
    st.set_page_config(page_title="Moiety", page_icon=str(ICON), layout="wide", initial_sidebar_state=230)
    st.html(panels.STYLE)
    credential = session.credential()
    if credential is None:
        session.ask_to_sign_in(settings)
        return
    if meet(session.client_of(settings, credential), settings):
        page = Page(settings, credential)
        pages = [
            st.Page(
                runner_of(view, page),
                title=view.title,
                icon=view.icon,
                url_path=view.path,
                default=view is PAGES[0],
            )
            for view in PAGES
            if view.needs is None or session.may(view.needs)
        ]
        chosen = st.navigation(pages)
        draw_who()
        session.take_notice()
        chosen.run()


def meet(client: AdminClient, settings: DashboardSettings) -> bool:
    """Whether the gateway knows who looks; if not, that is said."""
    try:
        session.caller(client)
    except GatewayAway as exc:
        st.error(f"{exc}.", icon=":material/cloud_off:")
        st.button("Try again")
    except (KeyRefused, RoleRefused, ApiRefused) as exc:
        session.sign_out()
        session.ask_to_sign_in(settings, f"The gateway refused the sign-in: {exc}")
    else:
        return True
    return False


def runner_of(view: View, page: Page) -> Callable[[], None]:
    """What Streamlit runs of a page."""

    def run() -> None:
        view.draw(page)

    run.__name__ = view.path  # by which Streamlit tells pages apart
    return run


def draw_who() -> None:
    """Who is signed in, at the foot of the navigation."""
    me = st.session_state[session.CALLER]
    with st.sidebar:
        whose = "one tenant" if me["tenant_id"] else "all tenants"
        st.caption(f"Signed in as **{me['role']}** of {whose}")
        if st.button("Sign out", icon=":material/logout:", width="stretch"):
            session.sign_out()
            st.rerun()


main()
