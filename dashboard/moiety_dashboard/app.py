"""The script that Streamlit runs: the frame around the page, the key, and what to say when the gateway is not there."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

from moiety_dashboard.client import AdminClient, ApiRefused, GatewayAway, KeyRefused, RoleRefused
from moiety_dashboard.settings import DashboardSettings, read_settings
from moiety_dashboard.views import overview

ICON = Path(__file__).parent / "icon.svg"  # a named one would be fetched from elsewhere
STYLE = """
<style>
  [data-testid="stMainBlockContainer"] { max-width: 1280px; padding-top: 2.2rem; padding-bottom: 3rem; }
  [data-testid="stMetricValue"] { font-variant-numeric: tabular-nums; font-weight: 600; font-size: 1.7rem; }
  [data-testid="stMetricLabel"] p { font-size: 0.82rem; color: #5b6461; }
  h1 { letter-spacing: -0.02em; padding-bottom: 0 !important; }
  h3 { padding-top: 1.2rem !important; font-size: 1.15rem !important; }
</style>
"""


def main() -> None:
    settings = read_settings(sys.argv[1:])
    st.set_page_config(page_title="Moiety", page_icon=str(ICON), layout="wide")
    st.html(STYLE)
    st.title("Moiety")
    admin_key = st.session_state.get("admin_key") or settings.admin_key
    if admin_key is None:
        ask_for_key("Enter an admin key. `moiety serve` printed one at its first start.")
        return
    show(settings, admin_key)


def show(settings: DashboardSettings, admin_key: str) -> None:
    """The page, drawn anew every few seconds."""

    @st.fragment(run_every=settings.refresh_s)
    def refresh() -> None:
        client = AdminClient(settings.gateway_url, admin_key)
        try:
            overview.draw(client)
        except GatewayAway as exc:
            st.error(f"{exc}. This page tries again by itself.", icon=":material/cloud_off:")
        except KeyRefused as exc:
            st.error(f"The gateway refused the admin key: {exc}", icon=":material/key_off:")
            ask_for_key("Enter another admin key.")
        except (ApiRefused, RoleRefused) as exc:
            st.error(str(exc), icon=":material/error:")
        finally:
            client.close()

    refresh()


def ask_for_key(why: str) -> None:
    """Keeps the key for this browser session only."""
    with st.form("admin key", border=True):
        st.markdown(why)
        entered = st.text_input("Admin key", type="password", autocomplete="off")
        if st.form_submit_button("Open the dashboard", type="primary") and entered:
            st.session_state["admin_key"] = entered.strip()
            st.rerun()


main()
