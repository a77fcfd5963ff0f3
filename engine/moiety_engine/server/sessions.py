"""Sessions of connected gateways, and the sending of messages to them.

All messages for a gateway in one turn of the event loop are sent as one frame: a step of the engine is one frame per
gateway, regardless of the number of its running requests. A gateway that does not read blocks no other: messages beyond
its socket queue wait in its outbox, which credit bounds for honest gateways and `max_outbox_messages` for all. Lost
gateways are recorded here; the request manager ends their requests.
"""

from __future__ import annotations

from collections import deque

import structlog
import zmq

from moiety_wire.codec import encode
from moiety_wire.engine_load import Load
from moiety_wire.messages import ToGateway

log = structlog.get_logger()


class GatewaySession:
    """Session of one gateway process, identified by its socket identity and, with CURVE, its public key.

    Sessions owns it; the request manager fills `open_keys`.
    """

    def __init__(self, identity: bytes, heard_at_s: float, public_key: str = "") -> None:
        self.identity = identity
        self.public_key = public_key
        self.sleep_refusal = ""  # why its sleep command was refused
        self.gateway_id = ""
        self.replica_id = ""  # id of its process, which may reconnect with another session
        self.heard_at_s = heard_at_s
        self.open_keys: dict[str, int] = {}  # request id → key
        self.unsent: list[ToGateway] = []  # messages of this turn
        self.outbox: deque[tuple[bytes, int]] = deque()  # unsent frames, with their numbers of messages
        self.num_waiting = 0  # messages in the outbox
        self.wants_card = False
        self.has_card = False
        self.is_gone = False
        self.num_loads = 0
        self.sent_load: Load | None = None  # the last one, without its number and the uptime …
        self.idle_beats = 0  # … and beats of the engine since then


class Sessions:
    """Owns the sessions. Used by one thread."""

    def __init__(self, socket: zmq.Socket[bytes], *, max_outbox_messages: int) -> None:
        """Create the sessions. `socket` is a bound ROUTER with ROUTER_MANDATORY; the caller keeps its ownership."""
        self._socket = socket
        self._max_outbox_messages = max_outbox_messages
        self._by_identity: dict[bytes, GatewaySession] = {}
        self._gone: list[GatewaySession] = []
        self._with_unsent: list[GatewaySession] = []
        self._with_outbox: set[GatewaySession] = set()

    def all(self) -> list[GatewaySession]:
        return list(self._by_identity.values())

    def with_card(self) -> list[GatewaySession]:
        """Return the sessions of gateways that have got the model card."""
        return [session for session in self.all() if session.has_card]

    def replicas_with_open(self) -> set[str]:
        """Return the gateway processes with open requests."""
        return {session.replica_id for session in self.all() if session.open_keys and session.replica_id}

    def session_of_sender(self, identity: bytes, now_s: float, public_key: str = "") -> GatewaySession:
        """Return the session of a gateway that has just sent a message; create it if the gateway is new.

        If the identity is used with another key, the old session ends, and nothing of it passes to the new one.
        """
        session = self._by_identity.get(identity)
        if session is not None and session.public_key != public_key:
            self.lose(session, "another key uses its identity")
            session = None
        if session is None:
            session = self._by_identity[identity] = GatewaySession(identity, now_s, public_key)
        session.heard_at_s = now_s
        return session

    def post(self, session: GatewaySession, message: ToGateway) -> None:
        """Queue a message for the next `flush`, or for the outbox; drop it if the gateway is gone. Never raises."""
        if session.is_gone or (session.outbox and isinstance(message, Load)):  # a newer load follows once it reads
            return
        if not session.unsent:
            self._with_unsent.append(session)
        session.unsent.append(message)

    def flush(self) -> None:
        """Send the messages that were posted in this turn. Never blocks, never raises."""
        sessions, self._with_unsent = self._with_unsent, []
        for session in sessions:
            messages, session.unsent = session.unsent, []
            if session.is_gone:
                continue
            frame = encode(*messages)
            if session.outbox or not self._send(session, frame):
                self._keep(session, frame, len(messages))

    def _keep(self, session: GatewaySession, frame: bytes, num_messages: int) -> None:
        if session.is_gone:
            return
        session.outbox.append((frame, num_messages))
        session.num_waiting += num_messages
        self._with_outbox.add(session)
        if session.num_waiting > self._max_outbox_messages:
            self.lose(session, "does not read")

    @property
    def has_outbox(self) -> bool:
        return bool(self._with_outbox)

    def retry(self) -> None:
        """Send from the outboxes until the sockets accept no more."""
        for session in list(self._with_outbox):
            while session.outbox and self._send(session, session.outbox[0][0]):
                session.num_waiting -= session.outbox.popleft()[1]
            if not session.outbox:
                self._with_outbox.discard(session)

    def lose(self, session: GatewaySession, why: str) -> None:
        """End the session of a gateway; `take_gone` then returns it, so that its requests are ended."""
        if session.is_gone:
            return
        session.is_gone = True
        session.outbox.clear()
        session.unsent.clear()
        self._with_outbox.discard(session)
        if self._by_identity.get(session.identity) is session:
            del self._by_identity[session.identity]
        self._gone.append(session)
        log.info("gateway_lost", gateway_id=session.gateway_id, reason=why, num_open=len(session.open_keys))

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
