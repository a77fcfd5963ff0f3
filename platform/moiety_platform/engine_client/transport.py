"""The ZeroMQ client of one engine: a DEALER socket kept connected for ever, and the streams that run over it.

A *session* is one socket with its own identity, from Hello to the loss of the engine. It is lost when the connection
drops, when nothing was heard for SILENCE_LIMIT_S, or when another engine id answers at the address; then all its
streams fail at once and the next session begins. Knows nothing of routing or of what the tokens mean.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from moiety_platform.clock import Clock
from moiety_platform.engine_client.base import EngineState
from moiety_platform.engine_client.curve import CurveKeys
from moiety_platform.engine_client.inbox import Inbox
from moiety_platform.engine_client.lending import Lending, ReadAdapter
from moiety_platform.engine_client.questions import Questions
from moiety_platform.engine_client.stream import ABORT_WAIT_S, EngineStream
from moiety_platform.errors import FORM_NOT_SUPPORTED, NO_FORMS, BadRequest, EngineFailed, Unavailable
from moiety_wire.codec import decode_to_gateway, encode, encode_in_frames
from moiety_wire.errors import UndecodableMessage
from moiety_wire.experts import ExpertBalance, ExpertLoad
from moiety_wire.figures import Load
from moiety_wire.messages import (
    HEARTBEAT_INTERVAL_S,
    PROTOCOL_VERSION,
    SILENCE_LIMIT_S,
    Accepted,
    Card,
    Failed,
    Finished,
    Forget,
    Heartbeat,
    Hello,
    Metered,
    Rest,
    Settled,
    Submit,
    ToEngine,
    ToGateway,
    Tokens,
    Unsettled,
)

RECONNECT_PAUSE_S = 0.05
MESSAGES_A_TURN = 512  # then other tasks of the loop get theirs
FRAME_BYTES = 1024 * 1024  # or one message; an engine hangs up on who sends it a frame that is far larger
SETTLED_AT_ONCE = 256  # requests in one message
FORGOTTEN_AT_ONCE = 1000  # tenants
MAX_SETTLED = 200_000  # that are remembered for an engine that is away

_OfRequest = (Tokens, Finished, Accepted, Failed)
OnUnsettled = Callable[[Sequence[Metered], Callable[[str, list[str]], None]], None]

log = structlog.get_logger(__name__)


class ZmqEngineClient:
    """One engine at one address. Implements EngineClient."""

    def __init__(
        self,
        address: str,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock,
        curve: CurveKeys | None = None,
        *,
        replica_id: str = "",
        on_unsettled: OnUnsettled | None = None,
        adapters: ReadAdapter | None = None,
    ) -> None:
        """`replica_id` names this process to the engine; `on_unsettled` is given what others left unsettled, and how to
        say that it is stored; `adapters` reads those that requests name, for an engine that lacks them."""
        self._adapters = adapters
        self._replica_id = replica_id
        self._on_unsettled = on_unsettled
        self._forgotten: Collection[str] = ()  # tenants
        self._told: set[str] = set()  # of them, those that the engine knows of since it was connected
        self._settled: defaultdict[str, list[str]] = defaultdict(list)  # to be told, by gateway process
        self._address = address
        self._context = context
        self._clock = clock
        self._curve = curve
        self._on_change: Callable[[], None] = lambda: None
        self._num_connections = 0
        self._session: _Session | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._last_card: Card | None = None
        self._reason = "not connected yet"

    @property
    def address(self) -> str:
        return self._address

    @property
    def state(self) -> EngineState:
        session, count = self._session, self._num_connections
        if session is None or session.card is None:
            return EngineState(self._address, False, self._reason, self._last_card, None, 0, num_connections=count)
        return EngineState(
            self._address,
            not session.refusal,
            session.refusal,
            session.card,
            session.load,
            len(session.streams) - session.num_foreseeing,
            self._clock.monotonic() - session.load_at_s,
            count,
            self._clock.monotonic() - session.since_s,
            session.balance,
        )

    def watch(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def settled(self, request_id: str) -> None:
        self._note_settled(self._replica_id, [request_id])

    def forget(self, tenant_ids: Collection[str]) -> None:
        self._forgotten = tenant_ids
        self._tell_forgotten()

    def rest(self, *, asleep: bool) -> None:
        session = self._session
        if session is None or not self.state.healthy:
            raise Unavailable(f"the engine at {self._address} is not there; try again shortly", retry_after_s=1)
        session.send(Rest(asleep))

    async def expert_load(self, minutes: int, tenant_id: str | None) -> ExpertLoad:
        session = self._session
        if session is None or not self.state.healthy:
            raise Unavailable(f"the engine at {self._address} is not there; try again shortly", retry_after_s=1)
        return await session.questions.ask(minutes, tenant_id)

    async def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep_connected(), name=f"engine link {self._address}")

    async def close(self) -> None:
        if self._keeper is None:
            return
        self._keeper.cancel()
        await asyncio.wait({self._keeper})
        self._keeper = None

    @asynccontextmanager
    async def open(self, submit: Submit, inbox: Inbox[EngineStream] | None = None) -> AsyncIterator[EngineStream]:
        session = self._session
        if session is None or session.card is None or session.refusal:
            raise Unavailable(f"the engine for {submit.model!r} is not there; try again shortly", retry_after_s=1)
        stream = EngineStream(submit, inbox, session.send)
        if submit.guide is not None and not (session.card is not None and session.card.follows_guides):
            stream.fail(BadRequest(NO_FORMS.format(model=submit.model), code=FORM_NOT_SUPPORTED))
            yield stream
            return
        session.streams[submit.request_id] = stream
        session.num_foreseeing += submit.foresees is not None
        try:
            if submit.adapter and self._adapters is not None:
                await session.lending.submit(submit, stream, self._adapters)
            else:
                session.send(submit)
            yield stream
        finally:
            stream.abort()
            try:
                await self._settle(stream, session)
            finally:
                session.num_foreseeing -= submit.foresees is not None

    async def _settle(self, stream: EngineStream, session: _Session) -> None:
        try:
            await stream.wait_ended(ABORT_WAIT_S)
        finally:
            session.streams.pop(stream.request_id, None)
            if not stream.ended:
                log.warning("engine_abort_unanswered", request_id=stream.request_id, engine=self._address)

    def _note_settled(self, replica_id: str, request_ids: list[str]) -> None:
        """Told with the next heartbeat, or the first one after the engine is back; at once if there are many."""
        known = self._settled[replica_id]
        known += request_ids
        if len(known) >= SETTLED_AT_ONCE:
            self._tell_settled()

    def _tell_settled(self) -> None:
        session = self._session
        if session is None or session.card is None:
            if sum(map(len, self._settled.values())) > MAX_SETTLED:
                self._settled.clear()  # an engine that is away for so long has forgotten, or will tell others
            return
        settled, self._settled = self._settled, defaultdict(list)
        for replica_id, request_ids in settled.items():
            session.send(Settled(replica_id, request_ids))

    def _tell_forgotten(self) -> None:
        """What it has not been told since it was connected."""
        session = self._session
        if session is None or session.card is None or session.refusal or not session.card.forgets:
            return
        fresh = [one for one in self._forgotten if one not in self._told]
        self._told.update(fresh)
        for begin in range(0, len(fresh), FORGOTTEN_AT_ONCE):
            session.send(Forget(fresh[begin : begin + FORGOTTEN_AT_ONCE]))

    def _take_unsettled(self, message: Unsettled) -> None:
        if self._on_unsettled is not None:
            self._on_unsettled(message.records, self._note_settled)

    async def _keep_connected(self) -> None:
        while True:
            self._num_connections += 1
            self._session = session = _Session(
                self._address,
                self._context,
                self._clock,
                self._curve,
                self._notice,
                self._replica_id,
                self._tell_settled,
                self._take_unsettled,
            )
            try:
                lost = await session.run()
                self._reason = lost
                log.warning("engine_lost", engine=self._address, reason=lost, num_streams=len(session.streams))
            finally:
                session.close(EngineFailed("the engine was lost while it answered; send the request again"))
                self._session = None
                self._on_change()
            await asyncio.sleep(RECONNECT_PAUSE_S)

    def _notice(self, card: Card) -> None:
        self._last_card = card
        log.info("engine_connected", engine=self._address, engine_id=card.engine_id, model=card.model)
        self._told = set()
        self._tell_forgotten()
        self._on_change()


class _Session:
    """One socket and one identity; owned by the client that made it."""

    def __init__(
        self,
        address: str,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock,
        curve: CurveKeys | None,
        on_card: Callable[[Card], None],
        replica_id: str,
        on_beat: Callable[[], None],
        on_unsettled: Callable[[Unsettled], None],
    ) -> None:
        self._replica_id = replica_id
        self._on_beat = on_beat
        self._on_unsettled = on_unsettled
        self.streams: dict[str, EngineStream] = {}
        self.num_foreseeing = 0  # of them, those that nobody waits for
        self.card: Card | None = None
        self.load: Load | None = None
        self.balance: ExpertBalance | None = None
        self.questions = Questions(self.send)
        self.lending = Lending(self.send, lambda name: self.card is not None and name in self.card.adapters)
        self.load_at_s = clock.monotonic()
        self.since_s = clock.monotonic()  # the card came
        self.refusal = ""
        self._on_card = on_card
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._heard_at_s = clock.monotonic()
        self._num_heartbeats = 0
        self._drain_is_due = False
        self._unsent: list[ToEngine] = []
        self._id = f"gateway-{uuid.uuid4().hex}"
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._id.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)  # as well as IPv4
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for an engine that is not there
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
        self._loop.call_soon(self._drain_monitor)  # a descriptor announces nothing before its socket was read dry once
        self._socket.connect(address)

    async def run(self) -> str:
        """Keep the session; returns why it was lost."""
        beat_at_s = self._clock.monotonic()
        while True:
            self._beat()
            done, _ = await asyncio.wait({self._lost}, timeout=HEARTBEAT_INTERVAL_S)
            if done:
                return self._lost.result()
            since_s, beat_at_s = self._clock.monotonic() - beat_at_s, self._clock.monotonic()
            if self.card is not None and since_s > SILENCE_LIMIT_S:  # the engine has given this process up meanwhile
                return f"this process stood still for {since_s:.1f} s"
            self._drain()  # what lies in the socket was said, even if this process was too busy to hear it
            silent_s = self._clock.monotonic() - self._heard_at_s
            if self.card is not None and silent_s > SILENCE_LIMIT_S:
                return f"silent for {silent_s:.1f} s"

    def send(self, message: ToEngine) -> None:
        """Have a message sent, with all others of this turn of the loop."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Hand what is to be sent to the socket; if it cannot take it, the session is lost."""
        messages, self._unsent = self._unsent, []
        num_sent = 0
        for frame, num_messages in encode_in_frames(messages, FRAME_BYTES):
            if not self._try_send(frame):
                break
            num_sent += num_messages
        for message in messages[num_sent:]:
            stream = self.streams.get(message.request_id) if isinstance(message, Submit) else None
            if stream is not None:
                stream.fail(Unavailable("the engine is gone; try again shortly", retry_after_s=1))
        if num_sent < len(messages):
            self._lose("the connection is gone")

    def close(self, error: EngineFailed) -> None:
        """Fail what still runs and free the sockets."""
        for stream in list(self.streams.values()):
            stream.fail(error)
        self.questions.close()
        self.lending.close()
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
            self._try_send(encode(Heartbeat(self._num_heartbeats)))
            self._num_heartbeats += 1

    def _try_send(self, frame: bytes) -> bool:
        if self._socket.closed:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._drain_soon()  # a send may have swallowed the edge that announces messages to read
        return True

    def _drain_soon(self) -> None:
        if not self._drain_is_due:
            self._drain_is_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Read what has come. The socket's descriptor is edge-triggered: read until there is no more."""
        self._drain_is_due = False
        num_taken = 0
        while num_taken < MESSAGES_A_TURN:
            if self._socket.closed:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_at_s = self._clock.monotonic()
            try:
                messages = decode_to_gateway(frame)
            except UndecodableMessage as exc:
                log.warning("engine_message_undecodable", error=str(exc))
                messages = []
            for message in messages:
                self._take(message)
            num_taken += 1 + len(messages)
        self._drain_soon()

    def _take(self, message: ToGateway) -> None:
        if isinstance(message, _OfRequest):  # nearly every one is
            stream = self.streams.get(message.request_id)
            if stream is not None and not self.lending.takes(message):
                stream.deliver(message)
        elif isinstance(message, Card):
            self._take_card(message)
        elif isinstance(message, Unsettled):
            self._on_unsettled(message)
        elif isinstance(message, ExpertLoad):
            self.questions.take(message)
        elif isinstance(message, ExpertBalance):
            self.balance = message
        elif isinstance(message, Load):
            self.load, self.load_at_s = message, self._heard_at_s
            if self.card is not None and message.engine_id != self.card.engine_id:
                self._lose("the engine was restarted")

    def _take_card(self, card: Card) -> None:
        if self.card is not None and card.engine_id != self.card.engine_id:
            self._lose("the engine was restarted")
            return
        if card.protocol_version != PROTOCOL_VERSION:
            self.refusal = f"speaks protocol {card.protocol_version}, not {PROTOCOL_VERSION}; run one release of both"
        is_news = self.card is None
        self.card = card
        if is_news:
            self.since_s = self._clock.monotonic()
            self._on_card(card)

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
