"""What a page has of the frame around it: a client under the user's own credential, and what is said when the gateway
refuses or is away."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from moiety_dashboard import session
from moiety_dashboard.client import AdminClient, ApiRefused, GatewayAway, KeyRefused, RoleRefused
from moiety_dashboard.escaping import as_text
from moiety_dashboard.session import client_of
from moiety_dashboard.settings import DashboardSettings

Draw = Callable[[AdminClient], None]


@dataclass(frozen=True, slots=True)
class Page:
    """One drawing of one page."""

    settings: DashboardSettings
    credential: str
    others: dict[str, StreamlitPage] = field(default_factory=dict)  # those that there are for who looks, by path

    @contextmanager
    def asking(self) -> Iterator[AdminClient]:
        """A client; what it raises ends the block and is said on the page."""
        try:
            yield client_of(self.settings, self.credential)
        except GatewayAway as exc:
            st.error(f"{as_text(exc)}. This page tries again by itself.", icon=":material/cloud_off:")
        except KeyRefused as exc:
            st.error(f"The gateway no longer takes this sign-in: {as_text(exc)}", icon=":material/key_off:")
            st.button("Sign in again", on_click=session.sign_out)
        except RoleRefused as exc:
            st.info(f"Your role does not show this. {as_text(exc)}", icon=":material/lock:")
        except ApiRefused as exc:
            st.error(as_text(exc), icon=":material/error:")

    def live(self, draw: Draw, *, slower: float = 1.0) -> None:
        """A part that is drawn anew by itself, every few seconds, and alone. Whatever asks or edits stands outside of
        such parts."""

        @functools.wraps(draw)  # by its name Streamlit tells one part from another
        def guarded() -> None:
            with self.asking() as client:
                draw(client)

        st.fragment(guarded, run_every=self.settings.refresh_s * slower)()
