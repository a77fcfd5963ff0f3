"""Sending of unacknowledged usage to gateways that can store it."""

from __future__ import annotations

from moiety_engine.server.permissions import GatewayPermissions
from moiety_engine.server.sessions import GatewaySession, Sessions
from moiety_engine.server.usage_meter import UsageMeter
from moiety_wire.messages import MeteredUsage, UnacknowledgedUsage


class UnacknowledgedUsageSender:
    """Sends unacknowledged usage to connected gateways that submit requests. Used by one thread."""

    def __init__(self, engine_id: str, meter: UsageMeter, sessions: Sessions, permissions: GatewayPermissions) -> None:
        self._engine_id = engine_id
        self._meter = meter
        self._sessions = sessions
        self._permissions = permissions
        self._num_sent_for_gone = 0

    def send_due(self) -> None:
        """Send the unacknowledged usage of gone gateways to one connected gateway.

        Also send each connected gateway the usage that it seems to have forgotten.
        """
        sessions = [
            session
            for session in self._sessions.all()
            if session.has_card and not session.outbox and self._permissions.may_submit(session.public_key)
        ]
        if not sessions:
            return
        for session in sessions:
            forgotten = self._meter.due_from_earlier_engine(session.replica_id)
            if forgotten:
                self._send(session, forgotten)
        records = self._meter.due_of_absent({session.replica_id for session in self._sessions.all()})
        if records:
            self._num_sent_for_gone += 1  # rotate, in case one gateway does not store them
            self._send(sessions[self._num_sent_for_gone % len(sessions)], records)

    def _send(self, session: GatewaySession, records: list[MeteredUsage]) -> None:
        self._meter.note_sent(session.replica_id, records)
        self._sessions.post(session, UnacknowledgedUsage(self._engine_id, records))
