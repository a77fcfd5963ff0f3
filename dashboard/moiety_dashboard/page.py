"""Page context: a client under the user's own credential, and the error if the gateway refuses or is absent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, ApiRefused, GatewayUnreachable, KeyRefused, RoleRefused
from moiety_dashboard.escaping import as_text
from moiety_dashboard.session import client_of
from moiety_dashboard.settings import DashboardSettings

Draw = Callable[[AdminClient], None]


@dataclass(frozen=True, slots=True)
class Page:
    """One drawing of one page."""

    settings: DashboardSettings
    credential: str
    others: dict[str, StreamlitPage] = field(default_factory=dict)  # pages visible to the user, by path

    @contextmanager
    def asking(self, part: str = "") -> Iterator[AdminClient]:
        """Yield a client; an exception of the client ends the block and is shown on the page.

        While the gateway does not respond, the client returns the last answers to the same requests of the `part`.
        """
        session.probe_gateway(self.settings)
        state = session.gateway_state()
        drawing = state.begin_drawing(part)
        try:
            yield client_of(self.settings, self.credential, drawing)
            if drawing.is_away and not state.is_away:  # it stopped within the drawing
                state.note_silence()
                panels.draw_stale_badge()
        except GatewayUnreachable as exc:
            st.error(f"{as_text(exc)}. This page retries automatically.", icon=":material/cloud_off:")
        except KeyRefused as exc:
            st.error(f"The gateway no longer accepts this sign-in: {as_text(exc)}", icon=":material/key_off:")
            st.button("Sign in again", on_click=session.sign_out)
        except RoleRefused as exc:
            st.info(f"Your role does not allow this page. {as_text(exc)}", icon=":material/lock:")
        except ApiRefused as exc:
            st.error(as_text(exc), icon=":material/error:")

    def live(self, draw: Draw, *, slower: float = 1.0) -> None:
        """Draw a part that refreshes alone every few seconds. Inputs and edits must be outside such a part."""

        @functools.wraps(draw)  # Streamlit identifies parts by this name
        def guarded() -> None:
            with self.asking(f"{draw.__module__}.{draw.__qualname__}") as client:
                draw(client)

        st.fragment(guarded, run_every=self.settings.refresh_s * slower)()
