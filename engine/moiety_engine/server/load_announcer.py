"""Sending of the engine's load to gateways: to each with requests at every beat, to the others only where it is needed.

A gateway without requests here gets a load when it has changed, and in answer to each of its heartbeats. So a gateway
before many idle engines receives their loads together, in the same wake-ups of its event loop.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from moiety_engine.server.sessions import GatewaySession, Sessions
from moiety_wire.engine_load import Load

MAX_IDLE_BEATS = 3  # of the engine, after which a gateway that sends no heartbeats gets a load


class LoadAnnouncer:
    """Sender of one engine's load. `read` returns the load without the fields of a session. Used by one thread."""

    def __init__(self, sessions: Sessions, read: Callable[[], Load], clock: Callable[[], float]) -> None:
        self._sessions, self._read, self._clock = sessions, read, clock
        self._started_s = clock()

    def send_all(self) -> None:
        """Send the load to every gateway that has the model card."""
        sessions = self._sessions.with_card()
        if sessions:
            load = self._read()
            for session in sessions:
                self._send(session, _of_session(load, session))

    def send_due(self) -> None:
        """Send the load to the gateways that need it at this beat."""
        sessions = self._sessions.with_card()
        if not sessions:
            return
        load = self._read()
        for session in sessions:
            content = _of_session(load, session)
            session.idle_beats += 1
            if session.open_keys or session.idle_beats >= MAX_IDLE_BEATS or content != session.sent_load:
                self._send(session, content)

    def send(self, session: GatewaySession) -> None:
        """Send the load to one gateway."""
        self._send(session, _of_session(self._read(), session))

    def answer_heartbeat(self, session: GatewaySession) -> None:
        """Send the load to a gateway without requests, which gets no other unless it changes; once a beat at most."""
        if session.has_card and not session.open_keys and session.idle_beats:
            self.send(session)

    def _send(self, session: GatewaySession, content: Load) -> None:
        running_for_s = self._clock() - self._started_s
        self._sessions.post(
            session, msgspec.structs.replace(content, seq=session.num_loads, running_for_s=running_for_s)
        )
        session.num_loads += 1
        session.sent_load, session.idle_beats = content, 0


def _of_session(load: Load, session: GatewaySession) -> Load:
    """Return the load as this gateway gets it: with the reason why its own sleep command was refused."""
    if not session.sleep_refusal:
        return load
    return msgspec.structs.replace(load, sleep_problem=session.sleep_refusal)
