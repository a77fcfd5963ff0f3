"""Responses that are made in the background: their requests go on without their clients, until they end.

A request runs as a task of its own. Once its response is stored as queued, the client gets that and may leave. The
process extends the lease of its running responses. A response whose lease has run out belonged to a process that died,
and every gateway answers it as failed. A cancellation by another gateway is seen when the lease is extended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, cast

import msgspec
import structlog
from litestar.types import Message, Receive, Scope, Send

from moiety_platform.auth.principal import Principal
from moiety_platform.backoff import Backoff
from moiety_platform.errors import PlatformError, Unavailable
from moiety_platform.idempotency.key_store_client import KeyClaim
from moiety_platform.inference.endpoint import Endpoint, Serve
from moiety_platform.inference.response import (
    DISCONNECT_SIGNAL,
    SEND_WHOLE,
    STREAM_ID,
    ClientDisconnected,
    DisconnectSignal,
    HttpResponse,
    SendWhole,
)
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.responses_api.conversation_locks import ConversationLocks
from moiety_platform.responses_api.event_log import EventLog, statements_of
from moiety_platform.responses_api.response_service import ResponseService, with_end
from moiety_platform.settings import GatewaySettings

LEASE_MS = 30_000
EXTEND_S = 5.0
STORE_EVENTS_S = 0.5
RETRIES = Backoff(0.2, 3.0)
MAX_ERROR_BYTES = 64 * 1024

log = structlog.get_logger(__name__)


class BackgroundRun:
    """One request, which may go on without its client. Owned by the task that serves it."""

    def __init__(self, scope: Scope, send: Send, release_lock: Callable[[BackgroundRun], Awaitable[None]]) -> None:
        self.signal = DisconnectSignal.of(scope["state"])  # of the client
        self.disconnect = DisconnectSignal(self.signal.drop)  # of the request
        self.disconnect.has_left = self.signal.has_left
        self.signal.on_left = self.disconnect.note
        self.response_id: str | None = None  # once it is detached
        self.queued = b""
        self.headers: dict[str, str] = {}  # of the client's answer, unless it is streamed
        self.claim: KeyClaim | None = None  # the idempotency key that it is stored under
        self.events: EventLog | None = None  # of an answer that is streamed
        self.settled = asyncio.Event()  # detached, or ended
        self.error: PlatformError | None = None  # that ended a stream
        self.lock: tuple[str, str] | None = None  # ids of the conversation that is locked, and of the response
        self._release_lock = release_lock
        self._send = send
        self._send_whole: SendWhole | None = scope["state"].get(SEND_WHOLE)
        self._original_scope = scope
        self._status = 0
        self._error_body = b""
        own = {DISCONNECT_SIGNAL: self.disconnect, SEND_WHOLE: self._whole}
        self.scope = cast("Scope", {**scope, "state": {**scope["state"], **own}})

    def detach(self, response_id: str, queued: bytes, reply: HttpResponse, headers: dict[str, str]) -> None:
        """Let the request go on without its client, which gets `queued`. This answer completes the idempotency key."""
        self.queued, self.headers = queued, headers
        self.claim, reply.claim = reply.claim, None
        self._detach(response_id)

    async def detach_stream(
        self, response_id: str, queued: bytes, reply: HttpResponse, headers: dict[str, str]
    ) -> None:
        """Let the request go on without its client, which gets the events while it is connected.

        From now on the idempotency key stands for the stored stream.
        """
        self.queued, self.events = queued, EventLog()
        self._detach(response_id)
        claim, reply.claim = reply.claim, None
        if claim is not None:
            await claim.keep(200, {**headers, STREAM_ID: response_id})

    @property
    def streams(self) -> bool:
        return self.events is not None

    def _detach(self, response_id: str) -> None:
        self.response_id = response_id
        self.signal.on_left = None
        self.settled.set()

    def note_error(self, error: PlatformError) -> None:
        """Keep the error that has ended a stream."""
        self.error = error

    async def send(self, message: Message) -> None:
        """Send a part of the answer to the client, or discard it where the client has left or polls."""
        if self.lock is not None and _ends_answer(message):
            await self._release_lock(self)  # before the client knows that it may go on
        if self.response_id is None:
            await self._send(message)
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status >= 400 and message["type"] == "http.response.body":
            self._error_body = (self._error_body + message["body"])[:MAX_ERROR_BYTES]
        if self.streams and not self.signal.has_left:
            await self._send(message)

    def failure(self) -> dict[str, str]:
        """Return the error of a response that did not end by itself."""
        if self.error is not None:
            return {"code": "server_error", "message": self.error.message}
        try:
            message = msgspec.json.decode(self._error_body)["error"]["message"]
        except (msgspec.DecodeError, KeyError, TypeError):
            message = "the response was stopped before it ended; send it again"
        code = {429: "rate_limit_exceeded"}.get(self._status, "server_error" if self._status >= 500 else "")
        return {"code": code or ("invalid_prompt" if self._status else "server_error"), "message": str(message)}

    def _whole(self, scope: Scope, status: int, headers: Mapping[str, str], body: bytes) -> bool:
        if self._send_whole is None or self.response_id is not None or self.lock is not None:
            return False
        return self._send_whole(self._original_scope, status, headers, body)


class BackgroundRuns:
    """The running background responses of one gateway process. Enter it as a context."""

    def __init__(
        self, service: ResponseService, locks: ConversationLocks, drain_s: float, extend_s: float = EXTEND_S
    ) -> None:
        """Create it. `drain_s` bounds the wait for running responses, counted from the call of `drain`."""
        self._service = service
        self._locks = locks
        self.drain_s = drain_s
        self._drains_since: float | None = None  # monotonic
        self._is_forced = False
        self._of_task: dict[asyncio.Task[Any], BackgroundRun] = {}
        self.lease_extension = PeriodicTask("background_leases", self._extend, extend_s)
        self.event_storage = PeriodicTask("background_events", self._store_events, STORE_EVENTS_S)

    async def __aenter__(self) -> Self:
        self.lease_extension.start()
        self.event_storage.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for the running responses, then end the rest as failed."""
        tasks = list(self._of_task)
        if tasks:
            pending = (await asyncio.wait(tasks, timeout=self.drain_left_s()))[1]
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self.lease_extension.cancel()
        await self.event_storage.cancel()

    def use(self, settings: GatewaySettings) -> None:
        self.drain_s = settings.drain_s

    def drain(self) -> None:
        """Begin to count the time that running responses have to end; at the second call, wait for none."""
        self._is_forced = self._drains_since is not None
        if self._drains_since is None:
            self._drains_since = time.monotonic()

    def drain_left_s(self) -> float:
        """Return how long a stop still waits for running responses, in seconds."""
        waited_s = 0.0 if self._drains_since is None else time.monotonic() - self._drains_since
        return 0.0 if self._is_forced else max(0.0, self.drain_s - waited_s)

    @property
    def is_draining(self) -> bool:
        """True if the process is stopping."""
        return self._drains_since is not None

    @property
    def current(self) -> BackgroundRun:
        """The run of the current task."""
        task = asyncio.current_task()
        assert task is not None, "requests are served by tasks"
        return self._of_task[task]

    async def serve(self, serve: Serve, endpoint: Endpoint[Any], scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, until it has ended, or until the client has its answer if it goes on in the background."""
        run = BackgroundRun(scope, send, self._release_lock)
        task = asyncio.create_task(self._serve(run, serve(endpoint, run.scope, receive, run.send)))
        self._of_task[task] = run
        task.add_done_callback(self._ended)
        try:
            await run.settled.wait()
            if run.response_id is None:
                await task
            elif run.streams:
                await self._wait_for_stream(run, task)
            else:
                reply = HttpResponse(send, scope, endpoint.errors, endpoint.headers)
                reply.claim, reply.headers = run.claim, run.headers
                with contextlib.suppress(ClientDisconnected):
                    await reply.whole(200, run.queued)
        except asyncio.CancelledError:
            if run.response_id is None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            raise

    async def lock_conversation(self, whose: Principal, conversation_id: str, response_id: str) -> None:
        """Lock a conversation until the current request has ended. Raises BadRequest if another one has it."""
        self.current.lock = conversation_id, response_id  # released also if the outcome of the commit is in doubt
        await self._locks.acquire(whose, conversation_id, response_id)

    async def _release_lock(self, run: BackgroundRun) -> None:
        """Unlock the conversation of a request that has ended. Without the database the lock runs out by itself."""
        if run.lock is not None:
            lock, run.lock = run.lock, None
            try:
                await self._locks.release(*lock)
            except Unavailable as error:
                log.warning(
                    "conversation_not_unlocked",
                    response_id=lock[1],
                    reason=str(error),
                    advice="none needed: the lock expires by itself",
                )

    def cancel(self, response_id: str) -> None:
        """Stop a response if this process makes it."""
        for run in self._of_task.values():
            if run.response_id == response_id:
                run.disconnect.note()

    async def store_progress(self, response_id: str, body: bytes) -> None:
        """Store a running response. A database that is away does not matter: its end is stored later."""
        try:
            await self._service.update_run(response_id, body, ends=False)
        except Unavailable as error:
            log.warning(
                "background_progress_not_stored",
                response_id=response_id,
                reason=str(error),
                advice="restore the connection to the database",
            )

    async def store_end(self, response_id: str, body: bytes, events: EventLog | None = None) -> bytes:
        """Store a response that has ended, with its last events, and return it as it is stored.

        Retries for as long as a lease lasts, then raises Unavailable.
        """
        ends_s, num_tries = time.monotonic() + LEASE_MS / 1000, 0
        while True:
            try:
                return await self._service.update_run(response_id, body, ends=True, **_of_log(events)) or body
            except Unavailable:
                wait_s = RETRIES.after(num_tries)
                if time.monotonic() + wait_s > ends_s:
                    raise
            await asyncio.sleep(wait_s)
            num_tries += 1

    async def _wait_for_stream(self, run: BackgroundRun, task: asyncio.Task[None]) -> None:
        """Return when the stream has ended or its client has left."""
        left = asyncio.Event()
        run.signal.on_left = left.set
        if run.signal.has_left:
            return
        leaving = asyncio.create_task(left.wait())
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()

    async def _serve(self, run: BackgroundRun, serving: Any) -> None:
        try:
            await serving
        finally:
            if run.response_id is not None:
                await self._end(run, run.response_id)
            await self._release_lock(run)

    async def _end(self, run: BackgroundRun, response_id: str) -> None:
        """Store the failure of a response that is still running. One that ended by itself is stored already."""
        failed = with_end(run.queued, "failed", run.failure())
        try:
            await self._service.update_run(response_id, failed, ends=True, **_of_log(run.events))
        except Unavailable as error:  # its lease runs out
            log.warning(
                "background_response_not_ended",
                response_id=response_id,
                reason=str(error),
                advice="restore the connection to the database; the response ends as failed later",
            )

    def _ended(self, task: asyncio.Task[None]) -> None:
        run = self._of_task.pop(task)
        run.settled.set()
        if run.response_id is not None and not task.cancelled() and task.exception() is not None:
            log.error("background_response_failed", response_id=run.response_id, exc_info=task.exception())

    async def _store_events(self) -> None:
        """Store the events of the running responses since the last round."""
        logs = {run.response_id: run.events for run in self._of_task.values() if run.response_id and run.events}
        for response_id, events in logs.items():
            for chunks in statements_of(events.chunks()):  # others may write between two of them
                if await self._service.add_events({response_id: chunks}):
                    events.close()
                    log.warning(
                        "background_events_not_stored",
                        response_id=response_id,
                        reason="the storage limit of the tenant is reached",
                        advice="delete stored responses, or raise the tenant's storage limit",
                    )
                    break
                events.note_stored(chunks)

    async def _extend(self) -> None:
        """Extend the leases of the running responses, and stop those that no longer run in the database.

        Locks of conversations are extended too.
        """
        locking = [run.lock[1] for run in self._of_task.values() if run.lock is not None]
        if locking:
            await self._locks.extend(locking)
        runs = {run.response_id: run for run in list(self._of_task.values()) if run.response_id is not None}
        if not runs:
            return
        running = await self._service.extend_runs(list(runs), LEASE_MS)
        for response_id, run in runs.items():
            if response_id not in running:  # cancelled or deleted, or it has just ended
                run.disconnect.note()


def _of_log(events: EventLog | None) -> dict[str, Any]:
    """Return what is stored of a log with the end of its response."""
    return {} if events is None else {"events": events.chunks(), "num_events": events.num_events}


def _ends_answer(message: Message) -> bool:
    """Return whether a message begins an error, or is the last one of an answer."""
    if message["type"] == "http.response.start":
        return message["status"] >= 400
    return message["type"] == "http.response.body" and not message["more_body"]
