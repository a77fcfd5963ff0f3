"""Gateways that are connected, and the sending of messages to them.

A gateway that does not read holds up nobody: what its socket queue does not take waits in its outbox, which credit
bounds for honest gateways and `max_outbox_messages` for all. A gateway that is gone is noted here; ending its requests
is the desk's business.
"""

from __future__ import annotations

from collections import deque

import structlog
import zmq

from moiety_wire.codec import encode
from moiety_wire.messages import Load, ToGateway

log = structlog.get_logger()


class GatewaySession:
    """One gateway process, known by the identity of its socket. Owned by Sessions; the desk fills `open_keys`."""

    def __init__(self, identity: bytes, heard_at_s: float) -> None:
        self.identity = identity
        self.gateway_id = ""
        self.replica_id = ""  # of its process, which may come back by another session
        self.heard_at_s = heard_at_s
        self.open_keys: dict[str, int] = {}  # request id → key
        self.outbox: deque[bytes] = deque()
        self.wants_card = False
        self.has_card = False
        self.is_gone = False
        self.num_loads = 0


class Sessions:
    """Owns the sessions. One thread."""

    def __init__(self, socket: zmq.Socket[bytes], *, max_outbox_messages: int) -> None:
        """`socket` is a bound ROUTER with ROUTER_MANDATORY; it stays its maker's."""
        self._socket = socket
        self._max_outbox_messages = max_outbox_messages
        self._by_identity: dict[bytes, GatewaySession] = {}
        self._gone: list[GatewaySession] = []
        self._with_outbox: set[GatewaySession] = set()

    def all(self) -> list[GatewaySession]:
        return list(self._by_identity.values())

    def heard(self, identity: bytes, now_s: float) -> GatewaySession:
        """The session of a gateway that has just sent something; a new one if it was not known."""
        session = self._by_identity.get(identity)
        if session is None:
            session = self._by_identity[identity] = GatewaySession(identity, now_s)
        session.heard_at_s = now_s
        return session

    def post(self, session: GatewaySession, message: ToGateway) -> None:
        """Send, or keep for later, or drop if the gateway is gone. Never blocks, never raises."""
        if session.is_gone:
            return
        if session.outbox:
            if isinstance(message, Load):
                return  # it will be told when it reads again
            session.outbox.append(encode(message))
            if len(session.outbox) > self._max_outbox_messages:
                self.lose(session, "does not read")
            return
        data = encode(message)
        if not self._send(session, data) and not session.is_gone:
            session.outbox.append(data)
            self._with_outbox.add(session)

    @property
    def has_outbox(self) -> bool:
        return bool(self._with_outbox)

    def retry(self) -> None:
        """Send what the outboxes hold, as far as it goes."""
        for session in list(self._with_outbox):
            while session.outbox and self._send(session, session.outbox[0]):
                session.outbox.popleft()
            if not session.outbox:
                self._with_outbox.discard(session)

    def lose(self, session: GatewaySession, why: str) -> None:
        """Forget a gateway; `take_gone` hands it to whoever ends its requests."""
        if session.is_gone:
            return
        session.is_gone = True
        session.outbox.clear()
        self._with_outbox.discard(session)
        if self._by_identity.get(session.identity) is session:
            del self._by_identity[session.identity]
        self._gone.append(session)
        log.info("gateway_lost", gateway_id=session.gateway_id, why=why, num_open=len(session.open_keys))

    def take_gone(self) -> list[GatewaySession]:
        gone, self._gone = self._gone, []
        return gone

    def _send(self, session: GatewaySession, data: bytes) -> bool:
        try:
            self._socket.send_multipart((session.identity, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            self.lose(session, "unreachable")
            return False
        return True
