"""Parser for server-sent events with JSON data, without I/O.

It follows the specification of event streams (https://html.spec.whatwg.org/multipage/server-sent-events.html): a byte
order mark at the start, line ends LF, CR or CRLF, data of several lines. It is more tolerant in four points: data of
one line is an event at once, without the empty line that should follow. The last event needs no line end. A line that
is a JSON object without a field name is an event too, for servers that send a complete answer although a stream was
requested. A line `error:` is an error event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from moiety_platform.external_engines.dialect import MalformedAnswer

MAX_EVENT_BYTES = 4 * 1024 * 1024
BOM = b"\xef\xbb\xbf"
DONE: Final = None  # the event `[DONE]`, after which nothing follows

Event = dict[str, Any] | None

_decode = msgspec.json.Decoder().decode


class EventParser:
    """Incremental parser.

    Raises MalformedAnswer for data that is no JSON object, and for a line or an event of more than MAX_EVENT_BYTES.
    """

    def __init__(self) -> None:
        self._is_at_start = True
        self._skips_newline = False  # the last line ended with CR, so a following LF belongs to it
        self._rest: list[bytes] = []  # parts of an incomplete line
        self._rest_bytes = 0
        self._data: list[bytes] = []  # lines of an incomplete event
        self._data_bytes = 0
        self._type = b""

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that these bytes complete, each before later bytes are parsed.

        The iterator must be exhausted.
        """
        if self._is_at_start:
            chunk = self._after_mark(chunk)
        if self._skips_newline and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._skips_newline = False
        if b"\r" in chunk:
            self._skips_newline = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *lines = chunk.split(b"\n")
        self._rest.append(first)
        self._rest_bytes += len(first)
        if self._rest_bytes > MAX_EVENT_BYTES:
            raise MalformedAnswer(f"a line has more than {MAX_EVENT_BYTES} bytes")
        if not lines:
            return
        lines.insert(0, b"".join(self._rest))
        self._rest, self._rest_bytes = [lines.pop()], 0
        self._rest_bytes = len(self._rest[0])
        for line in lines:
            yield from self._take(line)

    def end(self) -> list[Event]:
        """Return the event that the end of the stream completes. A truncated event is dropped."""
        rest, self._rest = b"".join(self._rest), []
        try:
            return [*self._take(rest), *self._take(b"")]
        except MalformedAnswer:
            return []

    def _after_mark(self, chunk: bytes) -> bytes:
        """Return the bytes after a byte order mark, or nothing as long as these bytes may be the beginning of one."""
        chunk = b"".join(self._rest) + chunk
        self._rest, self._rest_bytes = [], 0
        if len(chunk) < len(BOM) and BOM.startswith(chunk):
            self._rest = [chunk]
            return b""
        self._is_at_start = False
        return chunk.removeprefix(BOM)

    def _take(self, line: bytes) -> list[Event]:
        if not line:
            return self._dispatch()
        if line.startswith(b"{") and not self._data:
            return self._begin(line)
        name, _, value = line.partition(b":")
        value = value.strip()
        match name:
            case b"data" if self._data:
                self._data.append(value)
                self._data_bytes += len(value) + 1
                if self._data_bytes > MAX_EVENT_BYTES:
                    raise MalformedAnswer(f"an event has more than {MAX_EVENT_BYTES} bytes")
            case b"data" if value == b"[DONE]":
                return [DONE]
            case b"data" if value:
                return self._begin(value)
            case b"event":
                self._type = value
            case b"error":  # error format of older llama.cpp servers
                return [{"error": _object(value)}]
        return []

    def _begin(self, value: bytes) -> list[Event]:
        """Return a JSON object in one line as an event. Otherwise begin an event of several lines."""
        try:
            event = _object(value)
        except MalformedAnswer:
            self._data, self._data_bytes = [value], len(value)
            return []
        return [self._typed(event)]

    def _dispatch(self) -> list[Event]:
        lines, self._data = self._data, []
        events: list[Event] = [self._typed(_object(b"\n".join(lines)))] if lines else []
        self._type = b""
        return events

    def _typed(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return the event, as an error if its type is `error`."""
        return {"error": event} if self._type == b"error" and event.get("error") is None else event


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedAnswer(f"an event is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise MalformedAnswer("an event is not an object")
    return found
