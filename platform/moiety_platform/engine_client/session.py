"""One session with one engine over a socket with its own identity, from Hello to loss, and the streams over it.

A session is lost when the connection drops, when nothing was received for SILENCE_LIMIT_S, or when another engine id
answers at the address. It is independent of routing and of the meaning of tokens.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable

import msgspec
import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from moiety_platform.clock import Clock
from moiety_platform.engine_client.adapter_sync import AdapterSync
from moiety_platform.engine_client.curve import CurveKeys
from moiety_platform.engine_client.engine_queries import EngineQueries
from moiety_platform.engine_client.image_sync import ImageSync
from moiety_platform.engine_client.prefix_blocks import PrefixBlocks
from moiety_platform.engine_client.session_timer import SessionTimer
from moiety_platform.engine_client.stream import EngineStream
from moiety_platform.errors import EngineFailed, Unavailable
from moiety_wire.codec import decode_to_gateway, encode, join_in_frames
from moiety_wire.engine_load import Load
from moiety_wire.errors import UndecodableMessage
from moiety_wire.experts import ExpertBalance, ExpertLoad
from moiety_wire.messages import (
    HEARTBEAT_INTERVAL_S,
    PROTOCOL_VERSION,
    SILENCE_LIMIT_S,
    Accepted,
    Failed,
    Finished,
    Forget,
    Heartbeat,
    Hello,
    ModelCard,
    Submit,
    ToEngine,
    ToGateway,
    Tokens,
    UnacknowledgedUsage,
)
from moiety_wire.prefix_events import PrefixEvents, PrefixSubscription

MESSAGES_A_TURN = 512  # then other tasks of the event loop run
FRAME_BYTES = 1024 * 1024  # or one message; an engine disconnects a sender of far larger frames
LATE_S = 2.4 * HEARTBEAT_INTERVAL_S  # after which the next message is late, also of an idle engine
REPORT_DELAY_S = 0.1  # a load report contains all requests that were sent so long before it arrived

_READABLE = int(zmq.POLLIN)  # an int, since arithmetic with the library's flags is slow
_STREAM_MESSAGES = (Tokens, Finished, Accepted, Failed)

log = structlog.get_logger(__name__)


class Session:
    """One session with an engine. Owned by the client that created it."""

    def __init__(
        self,
        address: str,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock,
        curve: CurveKeys | None,
        on_card: Callable[[ModelCard], None],
        replica_id: str,
        on_beat: Callable[[], None],
        on_unacknowledged: Callable[[UnacknowledgedUsage], None],
        timer: SessionTimer,
    ) -> None:
        self.address = address
        self._replica_id = replica_id
        self._on_beat = on_beat
        self._on_unacknowledged = on_unacknowledged
        self._timer = timer
        self.streams: dict[str, EngineStream] = {}
        self.num_speculative = 0  # streams that are speculative prefills
        self.unreported: dict[str, float] = {}  # when the other streams that `load` lacks were opened, by request id
        self.card: ModelCard | None = None
        self.load: Load | None = None
        self.balance: ExpertBalance | None = None
        self.prefix_blocks: PrefixBlocks | None = None  # None: the engine publishes none
        self._awaits_snapshot = False
        self.questions = EngineQueries(self.send)
        self.image_sync = ImageSync(self.send)
        self.adapter_sync = AdapterSync(self.send, lambda name: self.card is not None and name in self.card.adapters)
        self.load_at_s = clock.monotonic()
        self.since_s = clock.monotonic()  # when the model card arrived
        self.refusal = ""
        self._on_card = on_card
        self.clock = clock
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._heard_at_s = clock.monotonic()
        self._num_heartbeats = 0
        self._is_idle_beat = True  # so that the first one is sent
        self._drain_is_due = False
        self._unsent: list[ToEngine] = []
        self._encoded: list[bytes] = []  # of each unsent message
        self._id = f"gateway-{uuid.uuid4().hex}"
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._id.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)  # in addition to IPv4
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for an engine that is not connected
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the silence limit
        self._socket.setsockopt(zmq.RCVHWM, 0)  # bounded by credit
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if curve is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server_public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.client_public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve.client_secret)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.add_reader(self._monitor.fileno(), self._drain_monitor)
        self._loop.call_soon(self._drain_monitor)  # a descriptor signals only after its socket was drained once
        self._socket.connect(address)

    async def run(self) -> str:
        """Keep the session alive and return why it was lost."""
        self._ticked_at_s = self.clock.monotonic()
        self._beat()
        self._timer.add(self._tick)
        try:
            return await self._lost
        finally:
            self._timer.remove(self._tick)

    def _tick(self) -> None:
        """Send a heartbeat, or end the session if the engine is silent. A callback costs a tenth of a task's turn."""
        now_s = self.clock.monotonic()
        since_s, self._ticked_at_s = now_s - self._ticked_at_s, now_s
        if self.card is not None and since_s > SILENCE_LIMIT_S:  # the engine has dropped this process meanwhile
            self._lose(f"this process stood still for {since_s:.1f} s")
            return
        if now_s - self._heard_at_s > LATE_S:
            self._drain()  # count unread messages as activity, even if this process was too busy to read them
        silent_s = self.clock.monotonic() - self._heard_at_s
        if self.card is not None and silent_s > SILENCE_LIMIT_S:
            self._lose(f"silent for {silent_s:.1f} s")
            return
        self._beat()

    def send(self, message: ToEngine) -> None:
        """Queue a message. All messages of one turn of the event loop are sent together.

        Raises OverflowError or UnicodeEncodeError for a message that cannot be encoded, and then queues nothing.
        """
        if isinstance(message, Submit) and message.images:
            message = self.image_sync.with_references(message)
        elif isinstance(message, Forget):
            self.image_sync.forget_tenants(message.tenant_ids)
        self._encoded.append(encode(message))
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._loop.call_soon(self._flush)

    def drop_unsent(self, request_id: str) -> None:
        """Drop the copies of a request that could not be encoded, which are kept to send it again."""
        self.image_sync.submits.pop(request_id, None)
        self.adapter_sync.submits.pop(request_id, None)

    def _flush(self) -> None:
        """Write the queued messages to the socket. If it cannot take them, the session is lost."""
        messages, self._unsent = self._unsent, []
        encoded, self._encoded = self._encoded, []
        num_sent = 0
        for frame, num_messages in join_in_frames(encoded, FRAME_BYTES):
            if not self._try_send(frame):
                break
            num_sent += num_messages
        for message in messages[num_sent:]:
            stream = self.streams.get(message.request_id) if isinstance(message, Submit) else None
            if stream is not None:
                stream.fail(Unavailable("the engine is no longer available; try again shortly", retry_after_s=1))
        if num_sent < len(messages):
            self._lose("the connection is gone")

    def close(self, error: EngineFailed) -> None:
        """Fail the running streams and close the sockets."""
        for stream in list(self.streams.values()):
            stream.fail(error)
        self.questions.close()
        self.adapter_sync.close()
        self._drop_prefix_blocks()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _beat(self) -> None:
        if self.card is None:
            self._try_send(encode(Hello(self._id, replica_id=self._replica_id)))
        else:
            self._on_beat()
            self._flush()
            self._is_idle_beat = not self.streams and not self._is_idle_beat
            if not self._is_idle_beat:  # without requests, every second one is left out
                self._try_send(encode(Heartbeat(self._num_heartbeats)))
                self._num_heartbeats += 1

    def _try_send(self, frame: bytes) -> bool:
        if self._socket.closed:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        if int(self._socket.get(zmq.EVENTS)) & _READABLE:  # sending may have consumed the edge of the descriptor
            self._drain_soon()
        return True

    def _drain_soon(self) -> None:
        if not self._drain_is_due:
            self._drain_is_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Read all pending messages. The socket's descriptor is edge-triggered, so read until the socket is empty."""
        self._drain_is_due = False
        num_taken = 0
        while num_taken < MESSAGES_A_TURN:
            if self._socket.closed or not int(self._socket.get(zmq.EVENTS)) & _READABLE:
                return  # polling is cheaper than catching the exception of an empty socket
            frame = self._socket.recv(zmq.NOBLOCK)
            self._heard_at_s = self.clock.monotonic()
            try:
                messages = decode_to_gateway(frame)
            except UndecodableMessage as exc:
                log.warning(
                    "engine_message_undecodable", error=str(exc), advice="run the same release of gateway and engine"
                )
                messages = []
            for message in messages:
                if isinstance(message, _STREAM_MESSAGES):  # the common case
                    if self.image_sync.submits and self.image_sync.takes(message, self.streams):
                        continue
                    stream = self.streams.get(message.request_id)
                    if stream is not None and not (self.adapter_sync.submits and self.adapter_sync.takes(message)):
                        stream.deliver(message)
                else:
                    self._take(message)
            num_taken += 1 + len(messages)
        self._drain_soon()

    def _take(self, message: ToGateway) -> None:
        """Process a message that belongs to no request."""
        if isinstance(message, ModelCard):
            self._take_card(message)
        elif isinstance(message, UnacknowledgedUsage):
            self._on_unacknowledged(message)
        elif isinstance(message, ExpertLoad):
            self.questions.take(message)
        elif isinstance(message, ExpertBalance):
            self.balance = message
        elif isinstance(message, PrefixEvents):
            self._take_prefix_events(message)
        elif isinstance(message, Load):
            self._take_load(message)
            if self.card is not None and message.engine_id != self.card.engine_id:
                self._lose("the engine was restarted")

    def _take_load(self, load: Load) -> None:
        """Keep a load report. It contains the requests that were admitted or that were sent some time before it.

        A request can be on its way, or wait for the end of the engine's step, when the engine writes the report.
        """
        self.load, self.load_at_s = load, self._heard_at_s
        since_s = self._heard_at_s - REPORT_DELAY_S
        self.unreported = {
            request_id: opened_at_s
            for request_id, opened_at_s in self.unreported.items()
            if opened_at_s > since_s and self.streams[request_id].accepted is None
        }

    def _take_card(self, card: ModelCard) -> None:
        if self.card is not None and card.engine_id != self.card.engine_id:
            self._lose("the engine was restarted")
            return
        if card.protocol_version != PROTOCOL_VERSION:
            self.refusal = f"speaks protocol {card.protocol_version}, not {PROTOCOL_VERSION}; run one release of both"
        is_news = self.card is None
        tokenizer_json = sys.intern(card.tokenizer_json)  # makes comparing megabytes per request an identity check
        self.card = card = msgspec.structs.replace(card, tokenizer_json=tokenizer_json)
        if is_news:
            self.since_s = self.clock.monotonic()
            if card.publishes_prefixes:
                self.prefix_blocks = PrefixBlocks()
                self.send(PrefixSubscription())
            self._on_card(card)

    def _take_prefix_events(self, events: PrefixEvents) -> None:
        """Apply events; after a gap, ask for a snapshot once. Events that cannot be read end the use of events."""
        if self.prefix_blocks is None:
            return
        try:
            is_complete = self.prefix_blocks.apply(events)
        except ValueError as exc:
            log.warning("engine_prefix_events_unreadable", error=str(exc), advice="run the same release of both")
            self._drop_prefix_blocks()
            return
        if not is_complete and not self._awaits_snapshot:
            self.send(PrefixSubscription())
        self._awaits_snapshot = not is_complete

    def _drop_prefix_blocks(self) -> None:
        if self.prefix_blocks is not None:
            self.prefix_blocks.clear()
            self.prefix_blocks = None

    def _drain_monitor(self) -> None:
        while not self._monitor.closed:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._beat()
            elif event == zmq.EVENT_DISCONNECTED and self.card is not None:
                self._lose("the connection dropped")

    def _lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)
