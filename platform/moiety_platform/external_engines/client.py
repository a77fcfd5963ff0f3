"""Client of one external engine: a heartbeat, and a connection for each request.

The server is alive while it answers its health endpoint or while its streams flow. A server that refuses gets no new
requests, but its running requests continue, as on a server that drains. A server that is silent for the heartbeat's
`silence_s` has lost all its requests. A broken stream ends only its own request. The client is independent of routing
and of the meaning of tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from random import random

import httpx
import structlog

from moiety_platform.clock import Clock
from moiety_platform.engine_addresses import ExternalAddress, ExternalKind, ProviderProtocol
from moiety_platform.engine_client.base import NO_EXPERT_RANKS, EngineState
from moiety_platform.engine_client.chat_submit import ChatSubmit
from moiety_platform.engine_client.connection_log import warn_of_broken_connection
from moiety_platform.engine_client.stream import EngineStream, Inbox
from moiety_platform.errors import BadRequest, Conflict, EngineFailed, Unavailable
from moiety_platform.external_engines.answer import ExternalAnswer
from moiety_platform.external_engines.anthropic_messages import VERSION_HEADERS, AnthropicMessages
from moiety_platform.external_engines.chat import ChatCompletions
from moiety_platform.external_engines.completions import Completions
from moiety_platform.external_engines.content_encoding import NO_ENCODING
from moiety_platform.external_engines.dialect import Dialect
from moiety_platform.external_engines.external_request import ExternalRequest
from moiety_platform.external_engines.hosted_chat import HostedChat
from moiety_platform.external_engines.hosted_provider import HostedProvider, estimated_ids
from moiety_platform.external_engines.liveness import Liveness
from moiety_platform.external_engines.llama_cpp import LlamaCpp
from moiety_platform.external_engines.metrics import ExternalMetrics
from moiety_platform.external_engines.probe import ModelListUnavailable, NoResponse, Prober, UnhealthyServer
from moiety_platform.external_engines.probe_connection import ProbeConnection
from moiety_platform.external_engines.waiting import EndedRequests, class_loads
from moiety_platform.shared_wake_ups import next_round_s, process_phase_s
from moiety_wire.classes import ServiceClass
from moiety_wire.engine_load import Load
from moiety_wire.fleet_service import FleetService
from moiety_wire.messages import SILENCE_LIMIT_S, Abort, Extend, ModelCard, Submit

CONNECT_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 30.0
RESENDS = 1  # of a request on a connection that the server had closed
KEEP_ALIVE_S = 2.0  # shorter than the servers' own, so that they close no connection during a new request
LINGER_S = 0.1  # after an answer, until its connection is free
QUIET_CHECKS = 4  # in a row with the same metrics and without a request from here, after which a server is quiet
QUIET_INTERVALS = 4  # between two checks of a quiet server, which its kept connection tells apart from one that ended
DROPS_APART_S = 10.0  # between two checks because a kept connection was closed
JITTER = 0.1  # of the interval, by which a check is earlier, so that many servers are not checked at once
STREAM_SILENCE_S = 600.0  # within an answer: a request may be queued, or preempted between two tokens

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Health check of a server.

    The next check starts `interval_s` after an answer, which must arrive within `timeout_s`, and QUIET_INTERVALS times
    later while the server is quiet. After `silence_s` without an answer or a byte of a stream, the server's requests
    are lost.
    """

    interval_s: float = 1.0
    timeout_s: float = SILENCE_LIMIT_S
    silence_s: float = SILENCE_LIMIT_S


HEARTBEAT = Heartbeat()


class ExternalEngineClient:
    """Client of one external engine at one address. Implements EngineClient."""

    def __init__(
        self, address: ExternalAddress, clock: Clock, api_key: str | None = None, heartbeat: Heartbeat = HEARTBEAT
    ) -> None:
        """Create a client without connecting it.

        Raises moiety_text's errors if the tokenizer of the address cannot be used.
        """
        self._address = address
        self._heartbeat = heartbeat
        self._clock = clock
        hosted = address.hosted
        silence_s = STREAM_SILENCE_S if hosted is None else hosted.timeout_s
        self._http = httpx.AsyncClient(
            headers=NO_ENCODING,
            timeout=httpx.Timeout(silence_s, connect=CONNECT_TIMEOUT_S, write=WRITE_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_ALIVE_S),
            follow_redirects=False,
            trust_env=False,
            verify=_shared_tls(),
        )
        self._probe_now = asyncio.Event()
        self._probes = ProbeConnection(address.root_url, _shared_tls(), self._note_dropped)
        self.use_key(api_key)
        self._dialect: Dialect = LlamaCpp(address) if address.kind is ExternalKind.LLAMA_CPP else Completions(address)
        self._prober: Prober | HostedProvider
        if hosted is None:
            self._prober = Prober(address, self._probes, self._dialect.max_num_logprobs, heartbeat.timeout_s)
        else:
            self._prober = HostedProvider(address, _chat_dialect(address).max_num_logprobs)
        self._running: dict[str, tuple[EngineStream, ExternalAnswer, asyncio.Task[None]]] = {}
        self._on_change: Callable[[], None] = lambda: None
        self._is_healthy = False
        self._reason = "not connected yet"
        self._card: ModelCard | None = None
        self._figures: ExternalMetrics | None = None
        self._load: Load | None = None
        self._num_loads = 0
        self._num_ended = 0
        self._num_asked = 0  # requests when the metrics were last read
        self._num_quiet = 0  # checks in a row that found the same metrics and no request from here
        self._ends = EndedRequests()
        self._admitted: dict[str, tuple[ServiceClass, int]] = {}  # this gateway's requests, by class
        self._num_connections = 0
        self._liveness = Liveness(clock, heartbeat.silence_s)
        self._load_at_s = self._since_s = clock.monotonic()
        self._dropped_at_s = -DROPS_APART_S
        self._has_broken = False  # a stream broke since the last check: the server may have restarted
        self._watcher: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return self._address.name

    @property
    def state(self) -> EngineState:
        now_s = self._clock.monotonic()
        return EngineState(
            self.address,
            self._is_healthy,
            "" if self._is_healthy else self._reason,
            self._card,
            self._load,
            len(self._running),
            self._load_age_s(now_s),
            self._num_connections,
            now_s - self._since_s if self._is_healthy else 0.0,
        )

    def _load_age_s(self, now_s: float) -> float:
        """Return the age of the load. The pause between two checks of a quiet server does not count."""
        pause_s = (QUIET_INTERVALS - 1) * self._heartbeat.interval_s if self._is_quiet else 0.0
        return max(0.0, now_s - self._load_at_s - pause_s)

    def use_key(self, api_key: str | None) -> None:
        """Set the API key for later requests."""
        is_anthropic = self._address.protocol is ProviderProtocol.ANTHROPIC
        name = "X-Api-Key" if is_anthropic else "Authorization"
        self._http.headers.pop(name, None)
        self._http.headers.update(VERSION_HEADERS if is_anthropic else {})
        if api_key:
            self._http.headers[name] = api_key if is_anthropic else f"Bearer {api_key}"
        self._probes.use_headers(NO_ENCODING | ({name: self._http.headers[name]} if api_key else {}))

    def on_state_change(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def acknowledge_usage(self, request_id: str) -> None:
        """Do nothing. External engines keep no usage records."""

    def forget_tenants(self, tenant_ids: Collection[str]) -> None:
        """Do nothing.

        External engines have no such message. Cache entries under the tenant's salt are no longer used and are evicted
        in time.
        """

    def send_fleet_service(self, message: FleetService) -> None:
        """Do nothing: external engines have their own scheduling."""

    def set_asleep(self, *, asleep: bool) -> None:
        raise Conflict(
            f"the server at {self.address} is an external engine, which has no sleep mode; stop the server itself"
        )

    def scale_expert_ranks(self, num_ranks: int) -> None:
        raise Conflict(NO_EXPERT_RANKS.format(address=self.address))

    async def expert_load(self, minutes: int, tenant_id: str | None) -> None:
        """Return None. External engines report no expert load."""

    async def start(self) -> None:
        self._watcher = asyncio.create_task(self._keep_watch(), name=f"engine watch {self.address}")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
            self._watcher = None
        self._probes.close()
        if tasks := self._fail_all():
            await asyncio.wait(tasks)
        await self._http.aclose()

    @asynccontextmanager
    async def open(self, submit: Submit, inbox: Inbox[EngineStream] | None = None) -> AsyncIterator[EngineStream]:
        """Submit a request; see EngineClient. Also raises BadRequest for features that this kind of server lacks."""
        if not self._is_healthy:
            raise Unavailable(f"the engine for {submit.model!r} is not available; try again shortly", retry_after_s=1)
        stream = EngineStream(submit, inbox, self._take)
        stream.begins_by_output = True
        stream.credit_is_last = True  # the server gets its token limit once, with the request
        hosted = self._address.hosted
        ids_of = None if hosted is None else estimated_ids
        answer = ExternalAnswer(submit, self._prober.tokenizer, self._prober.eos_token_ids, self._clock, ids_of)
        if submit.images:
            raise Unavailable(
                f"this engine of {submit.model!r} does not accept images; try again shortly", retry_after_s=1
            )
        dialect = _chat_dialect(self._address) if isinstance(submit, ChatSubmit) else self._dialect
        refusal = _refusal_of(submit, dialect)
        if isinstance(submit, ChatSubmit) and submit.resumed_ids:  # no server goes on with an answer of a chat
            stream.fail(EngineFailed("the engine was lost while it answered; send the request again"))
            yield stream
            return
        if refusal:
            message = f"the engine of {submit.model!r} does not know {refusal}; leave that out"
            if submit.resumed_ids is None:
                raise BadRequest(message)
            stream.fail(BadRequest(message))  # another engine has begun it
            yield stream
            return
        url = self._address.root_url + dialect.path
        exchange = ExternalRequest(
            self._http,
            url,
            dialect,
            submit,
            answer,
            stream,
            self._clock,
            self._liveness.record_stream,
            self._suspect,
            retries=0 if hosted is None else hosted.retries,
            resends=RESENDS if hosted is None else 0,  # a provider may bill both
        )
        task = asyncio.create_task(exchange.run(), name=f"request {submit.request_id}")
        self._running[submit.request_id] = stream, answer, task
        if self._is_quiet:
            self._probe_now.set()  # the metrics are some seconds old
        name = submit.service.name
        self._admitted[name] = submit.service, self._admitted.get(name, (submit.service, 0))[1] + 1
        try:
            yield stream
        finally:
            stream.abort()
            try:
                await self._give_up(task)
            finally:
                self._running.pop(submit.request_id, None)
                self._num_ended += 1

    async def _give_up(self, task: asyncio.Task[None]) -> None:
        """Return when the request's connection is free again. Close it if that takes longer than LINGER_S."""
        try:
            if not task.done():
                await asyncio.wait({task}, timeout=LINGER_S)
        finally:
            task.cancel()

    def _take(self, message: Extend | Abort) -> None:
        running = self._running.get(message.request_id)
        if running is None or isinstance(message, Extend):
            return
        stream, answer, task = running
        task.cancel()  # closes the connection
        stream.deliver(answer.abort())

    async def _keep_watch(self) -> None:
        while True:
            self._probe_now.clear()
            try:
                await self._probe()
            except Exception as error:  # root of a task: log and retry; meanwhile the engine gets no requests
                log.exception("engine_probe_failed", engine=self.address)
                self._lost(f"its answers cannot be read: {error}")
            was_quiet = self._is_quiet
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_check_s()):
                    await self._probe_now.wait()
            if was_quiet:
                self._liveness.end_pause(self._heartbeat.interval_s)

    def _next_check_s(self) -> float:
        """Return the event loop's time of the next check. Those of quiet servers share the wake-ups of the process."""
        now_s = asyncio.get_running_loop().time()
        interval_s = self._heartbeat.interval_s
        if self._is_quiet:
            return next_round_s(now_s, QUIET_INTERVALS * interval_s, process_phase_s())
        return now_s + interval_s * (1 - JITTER * random())

    @property
    def _is_quiet(self) -> bool:
        return self._is_healthy and self._num_quiet >= QUIET_CHECKS

    async def _probe(self) -> None:
        has_broken, self._has_broken = self._has_broken, False
        try:
            await self._prober.check_health()
            self._liveness.record_data()
            card = None if self._is_healthy and not has_broken else await self._prober.card()
            is_quiet = await self._probe_load()
            self._num_quiet = self._num_quiet + 1 if is_quiet else 0
            if card is not None:
                self._connected(card)
        except UnhealthyServer as error:
            self._num_quiet = 0
            self._liveness.record_data()
            if isinstance(error, ModelListUnavailable) and self._is_healthy and self._liveness.is_streaming:
                return
            self._lost(str(error))
        except NoResponse as error:
            self._num_quiet = 0
            self._has_broken |= has_broken
            if self._liveness.is_lost:
                self._lost(str(error))
                self._fail_all()

    async def _probe_load(self) -> bool:
        """Read the server's metrics. Return whether they are unchanged and this gateway has had no request there."""
        asked = self._num_ended + len(self._running)
        before, self._figures = self._figures, await self._prober.metrics()
        is_quiet = self._figures == before and asked == self._num_asked and not self._running
        self._num_asked = asked
        self._note_load()
        return is_quiet

    def _connected(self, card: ModelCard) -> None:
        self._card, self._is_healthy = card, True
        self._num_connections += 1
        self._since_s = self._clock.monotonic()
        log.info("engine_connected", engine=self.address, engine_id=card.engine_id, model=card.model)
        self._on_change()

    def _lost(self, reason: str) -> None:
        was_healthy, self._is_healthy = self._is_healthy, False
        if was_healthy or reason != self._reason:
            warn_of_broken_connection("engine_lost", self.address, reason, len(self._running))
        self._reason = reason
        if was_healthy:
            self._on_change()

    def _suspect(self, reason: str) -> None:
        """Check the server at once after a broken connection. Its other connections may be healthy."""
        warn_of_broken_connection("engine_connection_broken", self.address, reason, len(self._running))
        self._has_broken = self._address.hosted is None  # a provider has not restarted because of a broken stream
        self._probe_now.set()

    def _note_dropped(self) -> None:
        """Check a server at once that closed the kept connection, unless it closes each after a short time."""
        now_s = self._clock.monotonic()
        if now_s - self._dropped_at_s >= DROPS_APART_S:
            self._dropped_at_s = now_s
            self._probe_now.set()

    def _fail_all(self) -> list[asyncio.Task[None]]:
        """Fail all streams and return their tasks, which have yet to end."""
        tasks = []
        for stream, _, task in list(self._running.values()):
            stream.fail(EngineFailed("the engine was lost while it answered; send the request again"))
            task.cancel()
            tasks.append(task)
        return tasks

    def _note_load(self) -> None:
        self._load_at_s = self._clock.monotonic()
        num_requests = self._figures.requests_total if self._figures is not None else 0
        self._ends.note(self._load_at_s, num_requests or self._num_ended)
        self._load = self._make_load()
        self._num_loads += 1

    def _make_load(self) -> Load:
        """Return the load that the server has just reported, or this gateway's own counts if it reports none."""
        figures = self._figures or ExternalMetrics(num_running=len(self._running), requests_total=self._num_ended)
        classes = class_loads(
            ((answer.service, answer.has_started) for _, answer, _ in self._running.values()),
            dict(self._admitted.values()),
            figures.num_waiting,
            self._ends.seconds_each,
            by_priority=self._address.priority,
        )
        return Load(
            engine_id=self.address,
            seq=self._num_loads,
            num_running=figures.num_running,
            num_waiting=figures.num_waiting,
            num_paused=0,
            kv_blocks_total=figures.kv_blocks_total,
            kv_blocks_used=figures.kv_blocks_used,
            kv_blocks_cached=0,
            block_size=figures.block_size,
            steps_total=0,
            prompt_tokens_total=figures.prompt_tokens_total,
            cached_tokens_total=figures.cached_tokens_total,
            output_tokens_total=figures.output_tokens_total,
            requests_total=figures.requests_total,
            classes=classes,
        )


def _refusal_of(submit: Submit, dialect: Dialect) -> str:
    """Return what the server does not support of the request, or "" if nothing."""
    return "adapters" if submit.adapter else dialect.refusal(submit)


def _chat_dialect(address: ExternalAddress) -> Dialect:
    """Return the dialect of one conversation that is sent as it is."""
    if address.protocol is ProviderProtocol.ANTHROPIC:
        return AnthropicMessages(address)
    return ChatCompletions(address) if address.hosted is None else HostedChat(address)


@cache
def _shared_tls() -> ssl.SSLContext:
    """Return the TLS context of all clients of the process, whose certificates take 20 ms to read."""
    return httpx.create_ssl_context(trust_env=False)
