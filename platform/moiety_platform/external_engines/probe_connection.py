"""One kept HTTP/1.1 connection to an external engine, for probes alone.

A probe a second to each of many servers is most of an idle gateway's work. A general HTTP client takes ten times as
long for one. The connection stays open between probes, so that a probe looks up no name and makes no TLS handshake,
and the end of the server's process is noticed at once. It does not know what the answers mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import httpx
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from moiety_platform.content_codings import CODINGS, ContentDecoder, UndecodableContent, UnknownCoding

MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_HEAD_BYTES = 64 * 1024  # of an answer with its trailer fields and the heads before it
ADDRESS_TIMEOUT_S = 1.0  # of a connection to one address of a name, if it has others
READ_HEADERS = frozenset({"content-encoding", "content-length", "transfer-encoding"})


class ProbeFailed(Exception):
    """The server cannot be reached, or it broke the connection or HTTP. The message says how."""


class InvalidBody(Exception):
    """The body is longer than MAX_ANSWER_BYTES, or does not have its content encoding. The message says which."""


@dataclass(slots=True)
class ProbeAnswer:
    """One complete answer, with the headers of READ_HEADERS."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class ProbeConnection:
    """A connection that is opened when it is needed. Owned by the prober of one server; for one request at a time.

    `on_dropped` is called when the server closes the connection between two requests.
    """

    def __init__(self, root_url: str, tls: ssl.SSLContext, on_dropped: Callable[[], None] = lambda: None) -> None:
        url = httpx.URL(root_url)
        self._host, self._prefix = url.host, url.raw_path.decode().rstrip("/")
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = tls if url.scheme == "https" else None
        self._netloc = url.netloc.decode()
        self._on_dropped = on_dropped
        self._heads: dict[str, bytes] = {}
        self._headers: dict[str, str] = {}
        self._protocol: _Answers | None = None
        self._last_address = ""  # to which a connection was made

    def use_headers(self, headers: Mapping[str, str]) -> None:
        """Set the headers of later requests, in addition to those of the connection itself."""
        self._headers = dict(headers)
        self._heads.clear()

    async def get(self, path: str) -> ProbeAnswer:
        """Return the answer to a GET request. Raises ProbeFailed or InvalidBody.

        A kept connection may end just as a request is sent. The request is then sent again, over a new connection.
        """
        kept, self._protocol = self._protocol, None
        if kept is not None and kept.is_open:
            with contextlib.suppress(_ClosedBeforeAnswer):
                return await self._ask(kept, path)
        try:
            made = await self._connect()
        except (OSError, ssl.SSLError) as error:
            raise ProbeFailed(str(error) or type(error).__name__) from error
        try:
            return await self._ask(made, path)
        except _ClosedBeforeAnswer as error:
            raise ProbeFailed("it closed the connection without an answer") from error

    async def _connect(self) -> _Answers:
        """Return a connection to the first address of the server's name that accepts one, the last good one first.

        Raises OSError or SSLError. Addresses that do not answer take ADDRESS_TIMEOUT_S each, except the last one.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        addresses = sorted(dict.fromkeys(str(one[4][0]) for one in found), key=lambda one: one != self._last_address)
        name = self._host if self._tls else None
        for address in addresses:
            is_last = address == addresses[-1]
            try:
                async with asyncio.timeout(None if is_last else ADDRESS_TIMEOUT_S):
                    _, made = await loop.create_connection(
                        lambda: _Answers(self._on_dropped), address, self._port, ssl=self._tls, server_hostname=name
                    )
            except (OSError, ssl.SSLError):  # a timeout is an OSError
                if is_last:
                    raise
            else:
                self._last_address = address
                return made
        raise OSError(f"{self._host} has no address")

    async def _ask(self, protocol: _Answers, path: str) -> ProbeAnswer:
        try:
            answer = await protocol.ask(self._head_of(path))
        except BaseException:
            protocol.close()
            raise
        if protocol.is_open:
            self._protocol = protocol
        return await _decoded(answer)

    def _head_of(self, path: str) -> bytes:
        head = self._heads.get(path)
        if head is None:
            fields = {"Host": self._netloc, "Accept": "*/*", **self._headers}
            lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            head = self._heads[path] = f"GET {self._prefix}{path} HTTP/1.1\r\n{lines}\r\n".encode()
        return head

    def close(self) -> None:
        """Close the connection, which the next request would open again."""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.close()


class _ClosedBeforeAnswer(Exception):
    """The connection ended before the first byte of an answer."""


class _Answers(asyncio.Protocol):
    """Reads one answer at a time. Its methods `on_…` are called by the parser."""

    def __init__(self, on_dropped: Callable[[], None]) -> None:
        self._on_dropped = on_dropped
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[ProbeAnswer] | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    async def ask(self, head: bytes) -> ProbeAnswer:
        """Send the head of a request and return its answer. Raises ProbeFailed, InvalidBody or _ClosedBeforeAnswer."""
        assert self._transport is not None, "only made connections are asked"
        self._answered = asyncio.get_running_loop().create_future()
        self._parser = HttpResponseParser(self)
        self._answer, self._body, self._has_begun = ProbeAnswer(), bytearray(), False
        self._num_bytes = self._num_head_bytes = 0
        self._has_head = False
        self._transport.write(head)
        return await self._answered

    def data_received(self, data: bytes) -> None:
        if self._answered is None or self._answered.done():
            self.close()  # bytes that nobody asked for
            return
        self._has_begun = True
        self._num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._fail(ProbeFailed(f"its answer is not valid HTTP: {error}"))
        if not self._has_head and self._num_bytes > MAX_HEAD_BYTES:
            self._fail(ProbeFailed(f"the head of its answer is longer than {MAX_HEAD_BYTES} bytes"))
        elif self._num_bytes > MAX_HEAD_BYTES + 2 * MAX_ANSWER_BYTES:  # more than any framing of a body takes
            self._fail(InvalidBody(f"more than {MAX_ANSWER_BYTES} bytes"))

    def eof_received(self) -> None:
        """Close the connection, as asyncio does after this."""

    def connection_lost(self, error: Exception | None) -> None:
        was_open, self.is_open = self.is_open, False
        if self._answered is None or self._answered.done():
            if was_open:
                self._on_dropped()
        elif not self._has_begun:
            self._fail(_ClosedBeforeAnswer())
        elif self._ends_with_connection():
            self.on_message_complete()
        else:
            self._fail(ProbeFailed("it closed the connection within an answer"))

    def _ends_with_connection(self) -> bool:
        headers = self._answer.headers
        return bool(self._answer.status) and not {"content-length", "transfer-encoding"} & headers.keys()

    def on_message_begin(self) -> None:
        if self._answered is None or self._answered.done():
            raise ProbeFailed("it sent more than one answer")  # stops the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_head_bytes += len(name) + len(value) + 4
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._fail(ProbeFailed(f"the head of its answer is longer than {MAX_HEAD_BYTES} bytes"))
            raise ProbeFailed("stop the parser")
        key = name.decode("latin-1").lower()
        if key in READ_HEADERS:
            text, before = value.decode("latin-1"), self._answer.headers.get(key)
            self._answer.headers[key] = text if before is None else f"{before}, {text}"

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        self._has_head = self._answer.status >= 200

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > MAX_ANSWER_BYTES:
            self._fail(InvalidBody(f"more than {MAX_ANSWER_BYTES} bytes"))
            raise ProbeFailed("stop the parser")

    def on_message_complete(self) -> None:
        assert self._answered is not None, "the parser reads only answers"
        if 100 <= self._answer.status < 200:  # the answer follows
            self._answer = ProbeAnswer()
            return
        if not self._parser.should_keep_alive():
            self.close()
        if not self._answered.done():
            self._answer.body = bytes(self._body)
            self._answered.set_result(self._answer)

    def _fail(self, error: Exception) -> None:
        assert self._answered is not None, "only answers fail"
        if not self._answered.done():
            self._answered.set_exception(error)
        self.close()

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


async def _decoded(answer: ProbeAnswer) -> ProbeAnswer:
    """Return the answer without its content encoding, which was not asked for. Raises InvalidBody."""
    told = answer.headers.get("content-encoding", "").lower().split(",")
    encodings = [one for one in map(str.strip, told) if one not in ("", "identity")]
    if not encodings:
        return answer
    body = bytearray()
    try:
        decoder = ContentDecoder(", ".join(encodings))
        for number, piece in enumerate(decoder.feed(answer.body)):
            if number:
                await asyncio.sleep(0)
            body += piece
            if len(body) > MAX_ANSWER_BYTES:
                raise InvalidBody(f"more than {MAX_ANSWER_BYTES} bytes")
    except UnknownCoding:
        raise InvalidBody(f"a Content-Encoding that is none of {', '.join(CODINGS)}; none was requested") from None
    except UndecodableContent:
        raise InvalidBody("content that cannot be decoded by its Content-Encoding") from None
    return ProbeAnswer(answer.status, answer.headers, bytes(body))
