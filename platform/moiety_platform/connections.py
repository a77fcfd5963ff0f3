"""Client connections: uvicorn's, with bounds on the request head and on the client's time.

A client that exceeds a bound, or violates HTTP, gets an error in its API's format and is disconnected. Until then only
the connection is held: a request is served once its head is complete, and everything expensive waits for its body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from litestar.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from moiety_platform.anthropic_api.errors import ANTHROPIC_ERRORS
from moiety_platform.errors import BadRequest, HeadTooLarge, PlatformError, RequestTimeout
from moiety_platform.http10 import UnchunkedSend
from moiety_platform.http_errors import OPENAI_ERRORS
from moiety_platform.inference.response import DISCONNECT_SIGNAL, SEND_WHOLE, DisconnectSignal
from moiety_platform.request_head import BAD_HTTP, MESSAGES_PATH, refusal_of, request_id_of
from moiety_platform.security_headers import AS_BYTES as SECURITY_LINES
from moiety_platform.security_headers import SECURITY_HEADERS
from moiety_platform.settings import GatewaySettings
from moiety_platform.upgrades import framing_head
from moiety_wire.shared_fields import CopyOf

MIN_BODY_BYTES_PER_S = 500  # minimum rate of a body that takes longer than the timeout
REUSE_S = 2.0  # idle time after which a stopping server closes a connection; a client that uses it earlier is answered
LINGER_S = 1.0  # further input is read and dropped for this long: a connection reset would discard the response


@dataclass(frozen=True, slots=True)
class ConnectionLimits(CopyOf[GatewaySettings]):
    """Bounds of a request's head, and timeouts."""

    max_header_bytes: int
    max_headers: int
    header_timeout_s: float
    body_timeout_s: float
    send_timeout_s: float
    keep_alive_s: int


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration with limits for its connections."""

    def __init__(self, app: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(
            app, http=ClientConnection, headers=SECURITY_HEADERS, timeout_keep_alive=limits.keep_alive_s, **options
        )
        self.limits = limits
        self.is_draining = False  # the server stops

    def use(self, limits: ConnectionLimits) -> None:
        """Use these limits for new connections, and for the next request of open ones."""
        self.limits, self.timeout_keep_alive = limits, limits.keep_alive_s

    @property
    def reuse_s(self) -> float:
        """Idle time after which a connection is closed while the server drains."""
        return min(REUSE_S, self.timeout_keep_alive, (self.timeout_graceful_shutdown or 0) / 2)


class _Phase(Enum):
    """The part of a request that the client sends next."""

    NOTHING = auto()  # nothing, or another request
    HEAD = auto()
    BODY = auto()


class CoalescingTransport:
    """A transport that combines the writes of one event-loop iteration: a response's head with its body."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)

    def write_now(self, data: bytes) -> None:
        """Write data that no more data follows."""
        if self._held:
            self.write(data)
            self.flush()
        elif not self._transport.is_closing():
            self._transport.write(data)

    def flush(self) -> None:
        held, self._held = self._held, []
        if held and not self._transport.is_closing():  # otherwise the client has disconnected within this iteration
            self._transport.writelines(held)

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the transport that are read less than once per request."""
        return getattr(self._transport, name)


class ClientConnection(HttpToolsProtocol):
    """One connection. It signals the client's disconnect to the application, and drops a client that reads nothing."""

    def __init__(self, config: ServerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._server = config
        self._limits = config.limits
        self.url = b""  # default until there is a request
        self._phase = _Phase.NOTHING
        self._header_bytes = 0  # of complete headers
        self._line_bytes = 0  # of an incomplete line of the head
        self._num_bytes = self._num_bytes_before = 0  # in total; at the start of the timer
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._disconnect = DisconnectSignal(self._drop)
        self._timed: _Phase | None = None
        self._is_refused = False
        self._is_draining = False  # the server stops: the next response is the last
        self._head_refusal: PlatformError | None = None  # reason for which the parser was stopped at the end of a head
        self._framing_head: bytes | None = None  # of a request to upgrade, whose body the parser does not see
        self._reads_framing_head = False  # the parser reads that generated head, which is not a request
        self._given_headers: Sequence[tuple[bytes, bytes]] = ()  # default headers of responses, and their lines
        self._given = b""

    # ── asyncio ──

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._gathering = CoalescingTransport(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._gathering))
        self._set_timer()
        if self._server.is_draining:
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_timer()
        self._clear_send_timer()
        super().connection_lost(exc)
        self._disconnect.note()
        self._forget_requests()

    def _forget_requests(self) -> None:
        """Drop references to requests, each of which holds the connection.

        Otherwise the connection would stay with its last request until a garbage collection. Code that still answers a
        request has its own references.
        """
        self.cycle = self.scope = None  # type: ignore[assignment]
        self.headers = []
        self.pipeline.clear()
        self._disconnect.drop = lambda: None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._clear_send_timer()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except HttpParserError:
            self._refuse_unparsable()
        if self._is_refused or self.transport.is_closing():
            return
        if self._phase is _Phase.HEAD and self._is_line_too_long(data):
            self._refuse(self._head_too_large())
            return
        if self._phase is _Phase.NOTHING and not self._is_idle:
            self._clear_timer()
        elif self._timed is not self._phase:
            self._set_timer()

    # ── the parser ──

    def _feed(self, data: bytes) -> None:
        """Parse all of the data. Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as stopped:
                data = data[stopped.args[0] :]
                if self._framing_head is not None:
                    self._expect_body(self._framing_head)
                if data:
                    continue
            return

    def _expect_body(self, framing: bytes) -> None:
        """Let a new parser read the following data as the body of the request whose head is complete."""
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # like uvicorn
        self._reads_framing_head = True
        self.parser.feed_data(framing)
        self._reads_framing_head, self._framing_head = False, None

    def on_url(self, url: bytes) -> None:
        if not self._reads_framing_head:
            super().on_url(url)

    def on_message_begin(self) -> None:
        if self._reads_framing_head:
            return
        super().on_message_begin()
        self._limits = self._server.limits
        if not self._is_draining:
            self.timeout_keep_alive = self._server.timeout_keep_alive
        self.scope["state"] |= {DISCONNECT_SIGNAL: self._disconnect, SEND_WHOLE: self._send_whole}
        self._phase, self._timed = _Phase.HEAD, None  # a running timer belongs to the previous phase
        self._header_bytes = self._line_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        # no calls in the common case, since one for every header would show
        headers, limits, name = self.headers, self._limits, name.lower()
        if self._phase is _Phase.BODY:
            pass  # a trailer field is dropped (RFC 9110, 6.5.1)
        elif name == b"expect":
            super().on_header(name, value)
        else:
            headers.append((name, value))
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes + len(self.url) > limits.max_header_bytes or len(headers) > limits.max_headers:
            raise self._head_too_large()  # stops the parser

    def on_headers_complete(self) -> None:
        if self._reads_framing_head:
            return
        if self._header_bytes + len(self.url) > self._limits.max_header_bytes:
            raise self._head_too_large()
        version = self.parser.get_http_version()
        self._head_refusal = refusal_of(self.parser.get_method().decode(), self.url, version, self.headers)
        if self._head_refusal is not None:
            raise self._head_refusal
        if version == "1.0":
            self.expect_100_continue = False  # HTTP/1.0 clients do not know the interim response (RFC 9110, 10.1.1)
        super().on_headers_complete()
        if self._is_draining and self.cycle is not None:
            self.cycle.keep_alive = False
        if version == "1.0" and self.cycle is not None:
            self.cycle.send = UnchunkedSend(self.cycle)  # type: ignore[method-assign]
        self._phase = _Phase.BODY
        if self.parser.should_upgrade():
            self._framing_head = framing_head(self.headers)

    def on_message_complete(self) -> None:
        if self._framing_head is not None:
            return  # the body still follows
        super().on_message_complete()
        self._phase, self._timed = _Phase.NOTHING, None

    def _refuse_unparsable(self) -> None:
        """Refuse the request at which the parser stopped: it is not HTTP, or exceeds a bound."""
        if self._head_refusal is not None:
            self._refuse(self._head_refusal)
        elif self._phase is not _Phase.NOTHING and self._is_too_large():
            self._refuse(self._head_too_large())
        else:
            self._refuse(BadRequest("This is not HTTP/1.1 as this server reads it; use an HTTP client", code=BAD_HTTP))

    # ── the server's stop ──

    def shutdown(self) -> None:
        """Announce the end of the connection with its next response, or close it once it was idle for `reuse_s`.

        A client of HTTP/1.1 may send a request while the server closes, and cannot know whether it was served. So a
        connection that is in use is closed with a response that says so (RFC 9112, 9.6): the present one if its head is
        not sent, otherwise the next. nginx has the same rule as `keepalive_min_timeout`.
        """
        self._is_draining = True
        timer, keep_alive_s = self.timeout_keep_alive_task, self.timeout_keep_alive
        self.timeout_keep_alive = self._server.reuse_s  # type: ignore[assignment]  # used as a float
        if self._is_answering:
            self.cycle.keep_alive = self.cycle.keep_alive and self.cycle.response_started
        elif self._phase is _Phase.NOTHING:
            idle_s = 0.0 if timer is None else self.loop.time() - (timer.when() - keep_alive_s)
            left_s = self.timeout_keep_alive - idle_s
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(max(0.0, left_s), self.timeout_keep_alive_handler)
        else:
            self._set_timer()

    def close_if_idle(self) -> None:
        """Close the connection at once, unless a response is in progress."""
        if not self._is_answering:
            self.transport.close()

    # ── responses ──

    def _send_whole(self, scope: Scope, status: int, headers: Mapping[str, str], body: bytes) -> bool:
        """Send a complete response with one write; see `SEND_WHOLE`. Return False if ASGI messages must send it.

        Those cases are a client that reads slowly or sends ahead, and a connection that ends with its response.
        """
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_started or cycle.disconnected:
            return False
        if cycle.scope is not scope:  # type: ignore[comparison-overlap]  # two libraries' names of one dict
            return False
        if not cycle.keep_alive or cycle.flow.write_paused or not "".join(headers.values()).isprintable():
            return False
        if cycle.default_headers is not self._given_headers:  # a new list each second
            self._given_headers = cycle.default_headers
            self._given = b"".join([b"%b: %b\r\n" % field for field in cycle.default_headers])
        own = "".join([f"{name.lower()}: {value}\r\n" for name, value in headers.items()]).encode()
        length = b"content-length: %d\r\n\r\n" % len(body)
        self._gathering.write_now(b"".join([STATUS_LINE[status], self._given, own, length, body]))
        cycle.waiting_for_100_continue = False
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        return True

    # ── bounds ──

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _delays_stop(self) -> bool:
        """True while the server stops and this connection has no response in progress."""
        return self._is_draining and not self._is_answering

    @property
    def _is_idle(self) -> bool:
        """True while no response is in progress and uvicorn's keep-alive timer does not run."""
        return (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None

    def _is_too_large(self) -> bool:
        num_bytes = self._header_bytes + len(self.url)
        return num_bytes > self._limits.max_header_bytes or len(self.headers) > self._limits.max_headers

    def _is_line_too_long(self, data: bytes) -> bool:
        """Return whether the incomplete header exceeds the bound. The parser buffers a header until it is complete."""
        end = data.rfind(b"\n")
        self._line_bytes = self._line_bytes + len(data) if end < 0 else len(data) - end - 1
        return self._header_bytes + self._line_bytes > self._limits.max_header_bytes

    def _head_too_large(self) -> HeadTooLarge:
        return HeadTooLarge(
            f"The request's line and headers are more than the {self._limits.max_header_bytes} bytes or "
            f"{self._limits.max_headers} headers that this server accepts; send less"
        )

    def _set_timer(self) -> None:
        """Limit the time of the present phase.

        While the server stops, the rest of a head, or of a body whose request is answered, delays it no longer than an
        idle connection.
        """
        self._clear_timer()
        self._timed, self._num_bytes_before = self._phase, self._num_bytes
        seconds = self._limits.body_timeout_s if self._phase is _Phase.BODY else self._limits.header_timeout_s
        if self._delays_stop:
            seconds = min(seconds, self._server.reuse_s)
        self._timer = self.loop.call_later(seconds, self._time_is_up)

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timed = None

    def _watch_sending(self) -> None:
        num_waiting = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self._limits.send_timeout_s, self._send_time_is_up, num_waiting)

    def _send_time_is_up(self, num_waiting: int) -> None:
        if self.transport.get_write_buffer_size() < num_waiting:
            self._watch_sending()  # slowly, but the client reads
        else:
            self._drop()  # closing would wait for the client to read the sent data

    def _clear_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _drop(self) -> None:
        self.transport.abort()

    def _time_is_up(self) -> None:
        if self.transport.is_closing():
            return
        if self._phase is _Phase.HEAD and self._is_answering:
            self._set_timer()  # a pipelined request
        elif self._phase is _Phase.BODY and self._body_comes_on() and not self._delays_stop:
            self._set_timer()
        elif self._phase is _Phase.NOTHING or (self._phase is _Phase.BODY and not self._is_answering):
            self.transport.close()
        else:
            what = "body" if self._phase is _Phase.BODY else "headers"
            self._refuse(RequestTimeout(f"The request's {what} did not arrive in time; send the request again, faster"))

    def _body_comes_on(self) -> bool:
        """Return whether the body arrives fast enough, or is delayed by this side."""
        num_bytes = self._num_bytes - self._num_bytes_before
        return self.flow.read_paused or num_bytes >= MIN_BODY_BYTES_PER_S * self._limits.body_timeout_s

    def _refuse(self, error: PlatformError) -> None:
        """Send the error and disconnect; the application sees a client disconnect."""
        self._is_refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or self.pipeline:
                self.transport.abort()  # within a response, no error can be sent
                return
            cycle.disconnected = True
            cycle.message_event.set()
            self._disconnect.note()
        body = self._word(error)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + SECURITY_LINES + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._clear_timer()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _word(self, error: PlatformError) -> bytes:
        """Return the error in the format of the requested API, as far as it is known."""
        if self.url.startswith(MESSAGES_PATH.encode()):
            return ANTHROPIC_ERRORS.body(error, request_id_of(cast(Scope, self.scope)))
        return OPENAI_ERRORS.body(error, "")
