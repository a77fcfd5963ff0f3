"""Engine server: the socket for gateways, the connection to the core, timers, and an orderly shutdown.

Everything runs in one event loop as callbacks; there is no task per request or token. The request manager handles text
and requests, the sessions handle sending.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import msgspec
import structlog
import zmq

from moiety_engine.image_decoding.decode_queue import ImageDecodeQueue
from moiety_engine.image_decoding.decoder import ImageFailure
from moiety_engine.images.prompt_images import PromptImage
from moiety_engine.messages import CoreHello, CoreLoad, CoreSlept, CoreState, CoreStep, PrefixChanges, ToCore, ToServer
from moiety_engine.server.adapter_store import AdapterStore
from moiety_engine.server.announcements import latest_load, make_card, make_load
from moiety_engine.server.core_link import CoreLink
from moiety_engine.server.expert_queries import ExpertQueries
from moiety_engine.server.load_announcer import LoadAnnouncer
from moiety_engine.server.metrics import ServerStats
from moiety_engine.server.permissions import GatewayPermissions
from moiety_engine.server.prefix_publisher import PrefixPublisher
from moiety_engine.server.request_manager import RequestManager
from moiety_engine.server.router import make_router
from moiety_engine.server.sessions import GatewaySession, Sessions
from moiety_engine.server.settings import ServerSettings
from moiety_engine.server.sleep_mode import SleepMode
from moiety_engine.server.unacknowledged_usage_log import UnacknowledgedUsageLog
from moiety_engine.server.unacknowledged_usage_sender import UnacknowledgedUsageSender
from moiety_engine.server.usage_journal import UsageJournal
from moiety_engine.server.usage_meter import UsageMeter
from moiety_engine.server.validation import ModelLimits
from moiety_engine.server.zmq_reader import ZmqReader
from moiety_text.folder import TextModel
from moiety_text.tokenizer import Tokenizer
from moiety_wire.codec import decode_to_engine
from moiety_wire.engine_load import Load, SleepState
from moiety_wire.errors import UndecodableMessage
from moiety_wire.experts import ExpertBalance, ExpertLoad, ExpertLoadQuery, ScaleExpertRanks
from moiety_wire.fleet_service import FleetService
from moiety_wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    AdapterPart,
    Extend,
    Failed,
    FailureCode,
    Forget,
    Heartbeat,
    Hello,
    ModelCard,
    SleepCommand,
    Submit,
    ToEngine,
    ToGateway,
    UsageAcknowledgement,
)
from moiety_wire.permissions import may_send
from moiety_wire.prefix_events import PrefixSubscription

log = structlog.get_logger()

OUTBOX_RETRY_S = 0.005
ABORT_GRACE_S = 5.0
LINGER_MS = 2000
LOADING = CoreLoad(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


class Ending(IntEnum):
    """Reason of the engine server's end; the exit code of its process."""

    DRAINED = 0
    CORE_DIED = 70  # while serving: a restart can help
    CORE_DID_NOT_START = 71  # a restart without changes does not help


class EngineServer:
    """Server of one engine. Call `start`, then `wait`; `begin_drain` requests the end."""

    def __init__(
        self,
        settings: ServerSettings,
        engine_id: str,
        text: TextModel,
        core: CoreLink,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        unacknowledged: UnacknowledgedUsageLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.engine_id = engine_id
        self.address = ""  # as bound
        self.num_undecodable = 0
        self.card: ModelCard | None = None
        self._text = text
        self._core = core
        self._clock = clock
        self._permissions = GatewayPermissions(settings.gateway_keys_file)
        self._socket = make_router(context, settings)
        self._sessions = Sessions(self._socket, max_outbox_messages=settings.max_outbox_messages)
        self._loads = LoadAnnouncer(self._sessions, self._current_load, clock)
        self._journal = UsageJournal(settings.usage_journal, engine_id) if settings.usage_journal else None
        self._unacknowledged = unacknowledged
        self._meter = UsageMeter(clock, self._journal, unacknowledged)
        self._usage_sender = UnacknowledgedUsageSender(engine_id, self._meter, self._sessions, self._permissions)
        tokenizer = Tokenizer.from_json(text.tokenizer_json)
        self._adapter_store = AdapterStore(settings.adapter_disk_bytes, settings.adapters)
        self._requests = RequestManager(tokenizer, self._post, self._meter, adapters=self._adapter_store)
        self._adapter_store.in_use = self._requests.adapters_in_use
        self._experts = ExpertQueries(self._post)
        self._prefixes = PrefixPublisher(self._sessions)
        self._sleep_mode = SleepMode()
        self._sleep = SleepState.AWAKE  # as last sent to gateways
        self._load = LOADING
        self._refusal = ""
        self._drain_until_s: float | None = None
        self._retry_is_due = False
        self._reader: ZmqReader | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._writer: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ModelCard] = self._loop.create_future()
        self._ended: asyncio.Future[Ending] = self._loop.create_future()

    @property
    def num_open(self) -> int:
        return self._requests.num_open

    def stats(self) -> ServerStats:
        """Return the figures for metrics. Callable from any thread."""
        num_gateways = len(self._sessions.with_card())
        of_messages = self.num_undecodable, self._permissions.num_refused
        counts = num_gateways, self.num_open, self._meter.num_unacknowledged, *of_messages
        load = self._requests.with_image_metrics(self._load)
        return ServerStats(load, *counts, is_ready=self.card is not None and self._requests.is_awake)

    async def start(self) -> None:
        """Bind the socket, and start the core. Raises zmq.ZMQError if the address cannot be bound."""
        self._socket.bind(self.settings.listen)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        has_users = self.settings.curve_secret_key is not None
        self._reader = ZmqReader(self._socket, self._take_frames, self._settle, has_users=has_users)
        self._beat = self._loop.call_later(self.settings.heartbeat_interval_s, self._on_beat)
        if self._unacknowledged is not None:
            self._writer = asyncio.create_task(self._meter.write_until(self._closing), name="unacknowledged-writer")
        await self._core.start(self)

    async def wait_ready(self) -> bool:
        """Return whether the engine became ready; False if it ended before."""
        ends: set[asyncio.Future[Any]] = {self._ready, self._ended}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return self._ready.done()

    def begin_drain(self, timeout_s: float | None = None) -> None:
        """Accept no more requests, finish the open ones, then end. A second call can shorten the time."""
        timeout_s = self.settings.drain_timeout_s if timeout_s is None else timeout_s
        first = self._drain_until_s is None
        self._drain_until_s = self._clock() + timeout_s
        self._requests.is_draining = True
        self._requests.abort_speculative_prefills()
        if first:
            log.info("engine_draining", num_open=self.num_open, timeout_s=timeout_s)
            self._loads.send_all()
        self._on_drain_time(timeout_s)

    async def wait(self) -> Ending:
        """Wait until the engine server has ended and all resources are freed."""
        try:
            return await self._ended
        finally:
            await self.close()

    async def close(self) -> None:
        """End at once and fail the open requests."""
        self._requests.fail_all(FailureCode.ENGINE_FAILED, "the engine was shut down; send the request to another one")
        if self._beat is not None:
            self._beat.cancel()
        self._prefixes.close()
        self._sessions.flush()  # send the failures before waiting for the core's end
        if self._requests.images is not None:
            await self._requests.images.close()
        await self._core.stop()
        self._sessions.flush()
        self._sessions.retry()
        if self._reader is not None:
            self._reader.close()
        self._adapter_store.close()
        if not self._socket.closed:
            self._socket.close(linger=LINGER_MS)
            if self._journal is not None:
                self._journal.close()
        self._closing.set()
        if self._writer is not None:
            await self._writer
            self._writer = None

    # ── from gateways ────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_frames(self, frames: list[bytes], public_key: str) -> None:
        identity, data = frames[0], frames[-1]
        try:
            if len(frames) != 2:
                raise UndecodableMessage(f"the message has {len(frames) - 1} frames instead of one")
            messages = decode_to_engine(data)
        except UndecodableMessage:
            self.num_undecodable += 1
            log.warning("gateway_message_undecodable", num_bytes=len(data), num_undecodable=self.num_undecodable)
            return
        roles = self._permissions.roles_of(public_key)
        if not roles:  # its key was removed from the list, or is new
            self._reload_keys()
            roles = self._permissions.roles_of(public_key)
        if not roles:
            session = GatewaySession(identity, self._clock(), public_key)
            for message in messages:
                self._permissions.note_refusal(session, message, "its key is not in the gateway keys file")
            return
        session = self._sessions.session_of_sender(identity, self._clock(), public_key)
        for message in messages:
            if not may_send(roles, message):
                self._refuse(session, message)
            elif isinstance(message, Heartbeat):
                self._loads.answer_heartbeat(session)
            else:
                self._take(session, message)

    def _refuse(self, session: GatewaySession, message: ToEngine) -> None:
        """Refuse a message that the gateway's roles do not allow; answer it where the protocol has an answer."""
        self._permissions.note_refusal(session, message, "its key lacks the role")
        match message:
            case Submit():
                text = "this gateway's key does not permit inference; send the request to another engine"
                self._post(session, Failed(message.request_id, 0, FailureCode.ENGINE_FAILED, text))
            case SleepCommand():
                session.sleep_refusal = "this gateway's key does not have the role administration"
                self._loads.send(session)

    def _take(self, session: GatewaySession, message: ToEngine) -> None:
        match message:
            case Submit():
                self._adapter_store.used(message.adapter, message.tenant_id)
                self._requests.submit(session, message)
            case AdapterPart():
                self._adapter_store.take(session.identity, message)
            case Extend():
                self._requests.extend(session, message)
            case Abort():
                self._requests.abort(session, message)
            case Hello():
                self._greet(session, message)
            case SleepCommand():
                log.info("engine_sleep_requested", asleep=message.asleep, num_open=self.num_open)
                self._sleep_mode.ask(asleep=message.asleep)
                self._requests.abort_speculative_prefills()
            case ExpertLoadQuery() | ScaleExpertRanks():
                self._experts.add(session, message)
            case Forget():
                self._adapter_store.forget(message.tenant_ids)
                self._requests.forget_tenants(message.tenant_ids)
            case FleetService():
                self._requests.forward_fleet_service(message, self.engine_id)
            case UsageAcknowledgement():
                num_refused = self._meter.acknowledge_from(session.replica_id, message.replica_id, message.request_ids)
                if num_refused:
                    self._permissions.note_refusal(session, message, "usage of another gateway")
            case PrefixSubscription():
                self._prefixes.subscribe(session)

    def _greet(self, session: GatewaySession, hello: Hello) -> None:
        if not self._permissions.claim_replica(hello.replica_id, session.public_key):
            self._permissions.note_refusal(session, hello, "another key uses this replica_id")
            return
        if session.gateway_id and session.gateway_id != hello.gateway_id:
            self._requests.abort_session(session)  # another process uses the identity
        if hello.protocol_version != PROTOCOL_VERSION:
            log.warning("gateway_protocol_differs", theirs=hello.protocol_version, ours=PROTOCOL_VERSION)
        session.gateway_id, session.replica_id = hello.gateway_id, hello.replica_id
        session.wants_card = True
        if self.card is not None:
            self._send_card(session, self.card)

    def _send_card(self, session: GatewaySession, card: ModelCard) -> None:
        session.wants_card, session.has_card = False, True
        if not self._permissions.may_submit(session.public_key):
            card = msgspec.structs.replace(card, kv_secret="", publishes_prefixes=False)  # only for submitters
        self._post(session, card)
        self._sessions.flush()  # alone in its frame, so that a gateway of another release can read the protocol version
        self._loads.send(session)
        self._experts.greet(session)

    # ── from the core ────────────────────────────────────────────────────────────────────────────────────────────────

    def on_message(self, message: ToServer) -> None:
        match message:
            case CoreStep():
                self._load = latest_load(self._load, message.load)
                self._requests.take_step(message)
            case ExpertLoad():
                self._experts.answer(message)
            case PrefixChanges():
                self._prefixes.take(message)
            case ExpertBalance():
                self._experts.send_balance(self._sessions.all(), message)
            case CoreSlept():
                log.info("core_sleep_changed", asleep=message.asleep, reason=message.problem)
                self._sleep_mode.done(message)
            case CoreHello(state=CoreState.READY):
                self._become_ready(message)
            case CoreHello(state=CoreState.REFUSED):
                self._refusal = message.message
            case CoreHello():
                log.info("core_loading", progress=message.message)
        self._settle()

    def _on_images(self, key: int, result: tuple[PromptImage, ...] | ImageFailure) -> None:
        self._requests.take_images(key, result)
        self._settle()

    def on_death(self, reason: str) -> None:
        was_ready = self.card is not None
        log.error("core_died", reason=self._refusal or reason, was_ready=was_ready, num_open=self.num_open)
        message = "the engine's core process died; send the request again"
        self._requests.fail_all(FailureCode.ENGINE_FAILED, message, self._core.first_step_keys())
        self._end(Ending.CORE_DIED if was_ready else Ending.CORE_DID_NOT_START)

    def _become_ready(self, hello: CoreHello) -> None:
        settings = self.settings
        described = self._text, hello, settings.role, settings.adapters, settings.tool_format, settings.reasoning_format
        self.card = make_card(settings.model, self.engine_id, *described, settings.device_group)
        if self.card.images is not None and self._requests.images is None:
            self._requests.images = ImageDecodeQueue.of(self.card.images, settings.images, self._on_images)
        self._requests.limits = ModelLimits.of(self.card)
        for session in self._sessions.all():
            if session.wants_card:
                self._send_card(session, self.card)
        if not self._ready.done():
            self._ready.set_result(self.card)

    # ── sending, timers, the end ─────────────────────────────────────────────────────────────────────────────────────

    def _post(self, session: GatewaySession, message: ToGateway) -> None:
        self._sessions.post(session, message)

    def _settle(self) -> None:
        """Finish a turn: forward the messages and commands that it produced."""
        self._sessions.flush()
        for session in self._sessions.take_gone():
            self._requests.abort_session(session)
            self._adapter_store.drop_uploads(session.identity)
        commands = self._requests.take_commands()
        if self.card is not None:
            commands = [
                *self._adapter_store.take_commands(),
                *commands,
                *self._keep_rest(),
                *self._experts.take_queries(),
            ]
        if commands:
            self._core.send(commands)
        if self._reader is not None:
            self._reader.read_soon()
        if self._sessions.has_outbox and not self._retry_is_due:
            self._retry_is_due = True
            self._loop.call_later(OUTBOX_RETRY_S, self._retry)
        if self._requests.is_draining and not self.num_open:
            self._end(Ending.DRAINED)

    def _keep_rest(self) -> list[ToCore]:
        """Return the command that brings the core to the requested sleep state; send gateways the new state."""
        command = self._sleep_mode.next_command(self.num_open)
        state = self._sleep_mode.state
        self._requests.is_awake = state is SleepState.AWAKE
        if state is not self._sleep:
            self._sleep = state
            self._loads.send_all()
            self._sessions.flush()
        return [] if command is None else [command]

    def _retry(self) -> None:
        self._retry_is_due = False
        if not self._socket.closed:
            self._sessions.retry()
            self._settle()

    def _on_beat(self) -> None:
        self._beat = self._loop.call_later(self.settings.heartbeat_interval_s, self._on_beat)
        now_s = self._clock()
        self._permissions.begin_interval()
        self._reload_keys()
        connected = {session.replica_id for session in self._sessions.all()}
        self._permissions.release_replicas(connected | self._meter.replicas)
        for session in self._sessions.all():
            if now_s - session.heard_at_s <= self.settings.silence_limit_s:
                continue
            if session.open_keys:
                self._requests.abort_session(session)  # it gets the end, if it still reads; lost at the next beat
            else:
                self._sessions.lose(session, "silent")
        self._loads.send_due()
        self._usage_sender.send_due()
        self._settle()

    def _reload_keys(self) -> None:
        """Reload the file of gateway keys, and end the sessions of removed keys."""
        if self._permissions.reload():
            for session in self._sessions.all():
                session.sleep_refusal = ""
                if not self._permissions.roles_of(session.public_key):
                    self._sessions.lose(session, "its key was removed from the gateway keys file")

    def _current_load(self) -> Load:
        return make_load(
            self.engine_id,
            self._requests.with_image_metrics(self._load),
            draining=self._requests.is_draining,
            sleep=self._sleep_mode.state,
            sleep_problem=self._sleep_mode.problem,
            unacknowledged_replicas=sorted(self._meter.replicas | self._sessions.replicas_with_open()),
        )

    def _on_drain_time(self, wait_s: float) -> None:
        """End the drain if no request is open; abort the open requests after the timeout; otherwise check again."""
        if self._ended.done() or self._drain_until_s is None:
            return
        left_s = self._drain_until_s - self._clock()
        if self.num_open and left_s <= 0:
            log.warning("drain_timed_out", num_open=self.num_open, advice="raise --drain-s to wait longer")
            self._requests.abort_all()
            self._loop.call_later(ABORT_GRACE_S, self._end, Ending.DRAINED)
        elif self.num_open:
            self._loop.call_later(wait_s, self._on_drain_time, max(left_s, 0.0))
        self._settle()

    def _end(self, ending: Ending) -> None:
        if not self._ended.done():
            self._ended.set_result(ending)
