"""Streaming parser of the multipart upload form, so that a file is never in memory as a whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from litestar.types import Receive
from multipart import (  # type: ignore[import-untyped]  # it comes with litestar, and has no types
    MultipartError,
    MultipartSegment,
    PushMultipartParser,
    parse_options_header,
)

from moiety_platform.errors import BadRequest, TooLarge
from moiety_platform.inference.response import ClientDisconnected

MAX_FIELD_BYTES = 1024
MAX_FIELDS = 16
FORM_BYTES = 64 * 1024  # bound on the form's bytes beside its file
MAX_EXCESS_FACTOR = (
    2  # an oversized form is read and dropped up to this many times the limit, so that the client gets the error
)

_HOW_TO = "send multipart/form-data with the fields 'purpose' and 'file'"


@dataclass(frozen=True, slots=True)
class Field:
    """One complete form field."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class FileBegins:
    """Start of the file's content."""

    filename: str


async def read_form(
    receive: Receive, headers: Iterable[tuple[bytes, bytes]], max_file_bytes: int
) -> AsyncIterator[Field | FileBegins | bytes]:
    """Yield the parts of the form in order: fields, and the file's content piece by piece.

    Raises BadRequest, TooLarge, or ClientDisconnected if the client disconnects.
    """
    parser = PushMultipartParser(_boundary(headers), max_segment_count=MAX_FIELDS, max_header_size=4096)
    form = _Form(max_file_bytes)
    received = 0
    too_large = TooLarge(f"the file is larger than the {max_file_bytes:,} bytes that this server accepts; split it")
    is_last = False
    while not is_last:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        if message["type"] != "http.request":
            continue
        is_last = not message["more_body"]
        received += len(message["body"])
        if received > max_file_bytes + FORM_BYTES:
            if received > MAX_EXCESS_FACTOR * (max_file_bytes + FORM_BYTES):
                raise too_large
            continue
        try:
            for event in parser.parse(message["body"]) if message["body"] and not parser.closed else ():
                for part in form.take(event):
                    yield part
        except MultipartError as exc:
            raise BadRequest(f"the form cannot be read ({exc}); {_HOW_TO}", code="invalid_form") from exc
    if received > max_file_bytes + FORM_BYTES or form.file_bytes > max_file_bytes:
        raise too_large
    try:
        parser.close()
    except MultipartError as exc:
        raise BadRequest(f"the form ends in the middle; {_HOW_TO}", code="invalid_form") from exc


class _Form:
    """State of the form being read."""

    def __init__(self, max_file_bytes: int) -> None:
        self._max_file_bytes = max_file_bytes
        self.file_bytes = 0
        self._has_file = False
        self._segment: MultipartSegment | None = None
        self._value = b""

    def take(self, event: MultipartSegment | bytes | bytearray | None) -> Iterable[Field | FileBegins | bytes]:
        """Yield the parts that a parser event completes. Raises BadRequest."""
        if isinstance(event, MultipartSegment):
            self._segment, self._value = event, b""
            if event.name == "file":
                if self._has_file:
                    raise BadRequest("there are two files in the form; upload one at a time", param="file")
                self._has_file = True
                yield FileBegins(event.filename or "upload")
        elif self._segment is not None and self._segment.name == "file":
            if event is not None:
                self.file_bytes += len(event)
                if self.file_bytes <= self._max_file_bytes:
                    yield bytes(event)
        elif event is not None:
            self._value += event
            if len(self._value) > MAX_FIELD_BYTES:
                raise BadRequest(f"a field of the form has more than {MAX_FIELD_BYTES} bytes", code="invalid_form")
        elif self._segment is not None:
            yield Field(self._segment.name, self._value.decode("utf-8", "replace"))


def _boundary(headers: Iterable[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"content-type":
            kind, options = parse_options_header(value.decode("latin-1"))
            boundary: str = options.get("boundary", "")
            if kind == "multipart/form-data" and 0 < len(boundary) <= 200 and boundary.isprintable():
                return boundary
    raise BadRequest(f"the body is not a valid form; {_HOW_TO}", code="invalid_form")
