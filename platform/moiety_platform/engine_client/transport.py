"""ZeroMQ client of one engine. It reconnects forever, one session after another, and opens streams.

A session (see `session`) is lost with the connection or the engine. All its streams then fail at once, and the next
session begins. The client is independent of routing and of the meaning of tokens.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import structlog
import zmq

from moiety_platform.clock import Clock
from moiety_platform.engine_client.adapter_sync import ReadAdapter
from moiety_platform.engine_client.base import EngineState, require_expert_ranks
from moiety_platform.engine_client.connection_log import warn_of_broken_connection
from moiety_platform.engine_client.curve import CurveKeys
from moiety_platform.engine_client.session import Session
from moiety_platform.engine_client.session_timer import SessionTimer
from moiety_platform.engine_client.stream import ABORT_WAIT_S, EngineStream, Inbox
from moiety_platform.errors import (
    STRUCTURED_OUTPUTS_UNAVAILABLE,
    UNSUPPORTED_RESPONSE_FORMAT,
    BadRequest,
    EngineDied,
    Unavailable,
)
from moiety_wire.experts import ExpertLoad, ScaleExpertRanks
from moiety_wire.fleet_service import FleetService
from moiety_wire.messages import (
    Forget,
    MeteredUsage,
    ModelCard,
    SleepCommand,
    Submit,
    UnacknowledgedUsage,
    UsageAcknowledgement,
)

RECONNECT_PAUSE_S = 0.05
SETTLED_AT_ONCE = 256  # requests per message
FORGOTTEN_AT_ONCE = 1000  # tenants per message
MAX_SETTLED = 200_000  # acknowledgements kept for a disconnected engine

OnUnacknowledged = Callable[[Sequence[MeteredUsage], Callable[[str, list[str]], None]], None]

log = structlog.get_logger(__name__)


class ZmqEngineClient:
    """Client of one engine at one address. Implements EngineClient."""

    def __init__(
        self,
        address: str,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock,
        curve: CurveKeys | None = None,
        *,
        replica_id: str = "",
        on_unacknowledged: OnUnacknowledged | None = None,
        adapters: ReadAdapter | None = None,
        timer: SessionTimer | None = None,
    ) -> None:
        """Create a client without connecting it.

        `replica_id` identifies this process to the engine. `on_unacknowledged` gets the usage that other gateway
        processes left unacknowledged, and a function that acknowledges it once stored. `adapters` reads the adapters
        that requests name, for an engine that lacks them. Clients of one event loop can share their `timer`.
        """
        self._adapters = adapters
        self._timer = timer or SessionTimer()
        self._replica_id = replica_id
        self._on_unacknowledged = on_unacknowledged
        self._forgotten: Collection[str] = ()  # deleted tenants
        self._told: set[str] = set()  # deleted tenants already sent over this connection
        self._settled: defaultdict[str, list[str]] = defaultdict(list)  # unsent, by gateway process
        self._address = address
        self._context = context
        self._clock = clock
        self._curve = curve
        self._on_change: Callable[[], None] = lambda: None
        self._num_connections = 0
        self._session: Session | None = None
        self._connection_task: asyncio.Task[None] | None = None
        self._last_card: ModelCard | None = None
        self._reason = "not connected yet; an engine listens when its model is loaded"

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
            len(session.streams) - session.num_speculative,
            self._clock.monotonic() - session.load_at_s,
            count,
            self._clock.monotonic() - session.since_s,
            session.balance,
            session.prefix_blocks,
            len(session.unreported),
        )

    def on_state_change(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def acknowledge_usage(self, request_id: str) -> None:
        self._note_settled(self._replica_id, [request_id])

    def forget_tenants(self, tenant_ids: Collection[str]) -> None:
        self._forgotten = tenant_ids
        self._notify_deleted_tenants()

    def send_fleet_service(self, message: FleetService) -> None:
        session = self._session
        if session is not None and session.card is not None and session.card.exchanges_service and not session.refusal:
            session.send(message)

    def set_asleep(self, *, asleep: bool) -> None:
        session = self._session
        if session is None or not self.state.healthy:
            raise Unavailable(f"the engine at {self._address} is not available; try again shortly", retry_after_s=1)
        session.send(SleepCommand(asleep))

    def scale_expert_ranks(self, num_ranks: int) -> None:
        session, load = self._session, self.state.load
        if session is None or not self.state.healthy:
            raise Unavailable(f"the engine at {self._address} is not available; try again shortly", retry_after_s=1)
        require_expert_ranks(load, self._address)
        session.send(ScaleExpertRanks(num_ranks))

    async def expert_load(self, minutes: int, tenant_id: str | None) -> ExpertLoad:
        session = self._session
        if session is None or not self.state.healthy:
            raise Unavailable(f"the engine at {self._address} is not available; try again shortly", retry_after_s=1)
        return await session.questions.ask(minutes, tenant_id)

    async def start(self) -> None:
        self._connection_task = asyncio.create_task(self._keep_connected(), name=f"engine link {self._address}")

    async def close(self) -> None:
        if self._connection_task is None:
            return
        self._connection_task.cancel()
        await asyncio.wait({self._connection_task})
        self._connection_task = None

    def open(self, submit: Submit, inbox: Inbox[EngineStream] | None = None) -> StreamContext:
        return StreamContext(self._ready_session, self._adapters, submit, inbox)

    def _ready_session(self, model: str) -> Session:
        """Return the session. Raises Unavailable."""
        session = self._session
        if session is None or session.card is None or session.refusal:
            raise Unavailable(f"the engine for {model!r} is not available; try again shortly", retry_after_s=1)
        return session

    def _note_settled(self, replica_id: str, request_ids: list[str]) -> None:
        """Queue acknowledgements for the next heartbeat or reconnection, or send them at once if there are many."""
        known = self._settled[replica_id]
        known += request_ids
        if len(known) >= SETTLED_AT_ONCE:
            self._notify_settled()

    def _notify_settled(self) -> None:
        session = self._session
        if session is None or session.card is None:
            if sum(map(len, self._settled.values())) > MAX_SETTLED:
                self._settled.clear()  # after so long the engine has dropped them or reports them to other gateways
            return
        settled, self._settled = self._settled, defaultdict(list)
        for replica_id, request_ids in settled.items():
            session.send(UsageAcknowledgement(replica_id, request_ids))

    def _notify_deleted_tenants(self) -> None:
        """Send the deleted tenants that were not yet sent over this connection."""
        session = self._session
        if session is None or session.card is None or session.refusal or not session.card.forgets:
            return
        fresh = [one for one in self._forgotten if one not in self._told]
        self._told.update(fresh)
        for begin in range(0, len(fresh), FORGOTTEN_AT_ONCE):
            session.send(Forget(fresh[begin : begin + FORGOTTEN_AT_ONCE]))

    def _take_unacknowledged(self, message: UnacknowledgedUsage) -> None:
        if self._on_unacknowledged is not None:
            self._on_unacknowledged(message.records, self._note_settled)

    async def _keep_connected(self) -> None:
        while True:
            self._num_connections += 1
            self._session = session = Session(
                self._address,
                self._context,
                self._clock,
                self._curve,
                self._notice,
                self._replica_id,
                self._notify_settled,
                self._take_unacknowledged,
                self._timer,
            )
            try:
                lost = await session.run()
                self._reason = lost
                warn_of_broken_connection("engine_lost", self._address, lost, len(session.streams))
            finally:
                message = "the engine was lost while it answered; send the request again"
                session.close(EngineDied(message, in_first_step=None))
                self._session = None
                self._on_change()
            await asyncio.sleep(RECONNECT_PAUSE_S)

    def _notice(self, card: ModelCard) -> None:
        self._last_card = card
        log.info("engine_connected", engine=self._address, engine_id=card.engine_id, model=card.model)
        self._told = set()
        self._notify_deleted_tenants()
        self._on_change()


class StreamContext:
    """A request at an engine for the lifetime of its context. See `EngineClient.open`.

    Every request creates one. It is a class since a generator would cost several times as much.
    """

    __slots__ = ("_adapters", "_inbox", "_ready_session", "_session", "_stream", "_submit")

    def __init__(
        self,
        ready_session: Callable[[str], Session],
        adapters: ReadAdapter | None,
        submit: Submit,
        inbox: Inbox[EngineStream] | None,
    ) -> None:
        self._ready_session, self._adapters = ready_session, adapters
        self._submit, self._inbox = submit, inbox
        self._session: Session | None = None  # session of the stream

    async def __aenter__(self) -> EngineStream:
        submit, session = self._submit, self._ready_session(self._submit.model)
        stream = EngineStream(submit, self._inbox, session.send)
        if submit.grammar is not None and not (session.card is not None and session.card.follows_grammars):
            stream.fail(
                BadRequest(STRUCTURED_OUTPUTS_UNAVAILABLE.format(model=submit.model), code=UNSUPPORTED_RESPONSE_FORMAT)
            )
            return stream
        self._session, self._stream = session, stream
        session.streams[submit.request_id] = stream
        if submit.speculative_prefill is None:
            session.unreported[submit.request_id] = session.clock.monotonic()
        else:
            session.num_speculative += 1
        try:
            if not submit.adapter or self._adapters is None:
                session.send(submit)
            else:
                await session.adapter_sync.submit(submit, stream, self._adapters)
        except (OverflowError, UnicodeEncodeError) as exc:  # nothing was sent
            session.drop_unsent(submit.request_id)
            self._forget(session)
            raise BadRequest(f"the request has a value that no engine can take: {exc}") from exc
        except BaseException:
            await self._leave(session)
            raise
        return stream

    async def __aexit__(self, *_: object) -> None:
        if self._session is None:
            return
        if self._stream.ended:  # the common case
            self._forget(self._session)
        else:
            await self._leave(self._session)

    async def _leave(self, session: Session) -> None:
        stream = self._stream
        stream.abort()
        try:
            await stream.wait_ended(ABORT_WAIT_S)
        finally:
            self._forget(session)
            if not stream.ended:
                log.warning(
                    "engine_abort_unanswered",
                    request_id=stream.request_id,
                    engine=session.address,
                    advice="check the log of this engine; it may still compute the request",
                )

    def _forget(self, session: Session) -> None:
        session.streams.pop(self._stream.request_id, None)
        session.unreported.pop(self._stream.request_id, None)
        session.num_speculative -= self._submit.speculative_prefill is not None
