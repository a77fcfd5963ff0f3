"""Lines of a batch's input file: parsing and validation. Pure; knows no store.

{"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from moiety_platform.batches.endpoints import BatchEndpoint
from moiety_platform.batches.line_limits import BatchLineLimits
from moiety_platform.batches.models import MAX_CUSTOM_ID_LENGTH
from moiety_platform.errors import BadRequest
from moiety_platform.inference.body_fields import InferenceBody
from moiety_platform.inference.request_body import decode_body
from moiety_platform.inference.shape_limits import ShapeLimits
from moiety_platform.json_depth import check_depth

BOM = codecs.BOM_UTF8  # some editors write it before the first line
MAX_ERRORS = 100  # maximum that is listed
TOO_MANY = "too_many_errors"


class Line(msgspec.Struct, frozen=True):
    """One line, decoded except for its body."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line's place in the file, and its bytes without the line's end. `text` is None for a line that is too long."""

    number: int  # from 1
    start: int
    text: bytes | None

    @property
    def num_bytes(self) -> int:
        return len(self.text or b"")


@dataclass(frozen=True, slots=True)
class GoodLine:
    """Metadata of a valid line."""

    number: int
    custom_id: str
    start: int
    num_bytes: int


class Splitter:
    """Splitter of a file that arrives in pieces into lines.

    It drops the bytes of a line that is too long at once, so memory is bounded.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = bytearray()
        self._is_too_long = False
        self._number = 1
        self._start = 0
        self._offset = 0

    def take(self, piece: bytes) -> Iterator[RawLine]:
        """Yield the lines that end within the piece."""
        *ended, rest = piece.split(b"\n")
        for part in ended:
            self._add(part)
            self._offset += 1
            yield from self._end()
        self._add(rest)

    def finish(self) -> Iterator[RawLine]:
        """Yield the last line, if the file does not end with a line's end."""
        yield from self._end()

    def _add(self, part: bytes) -> None:
        self._offset += len(part)
        if self._is_too_long or len(self._rest) + len(part) > self._max_line_bytes:
            self._is_too_long = True
            self._rest.clear()
        else:
            self._rest += part

    def _end(self) -> Iterator[RawLine]:
        """Yield the line that ends here; nothing for a blank line."""
        text = bytes(self._rest)
        skipped = len(BOM) if self._start == 0 and text.startswith(BOM) else 0
        text = text[skipped:]
        if self._is_too_long or text.strip():
            yield RawLine(self._number, self._start + skipped, None if self._is_too_long else text)
        self._rest.clear()
        self._is_too_long = False
        self._number += 1
        self._start = self._offset


class Checker:
    """Checker of the lines of one file, in order; it collects the errors in the API's form.

    Lines that were `checked` before are only located: the limits may have changed meanwhile.
    """

    def __init__(self, endpoint: BatchEndpoint, limits: BatchLineLimits, *, checked: bool = False) -> None:
        self._endpoint = endpoint
        self._limits = limits
        self._checked = checked
        self._seen: dict[str, int] = {}  # custom_id → line number
        self.num_lines = 0
        self.errors: list[dict[str, Any]] = []

    @property
    def has_too_many_errors(self) -> bool:
        """True if there are more errors than are listed, or the file has too many lines."""
        return len(self.errors) > MAX_ERRORS or (self.num_lines > self._limits.max_lines and not self._checked)

    def check(self, line: RawLine) -> GoodLine | None:
        """Check a line; return None for an invalid line, whose error is recorded."""
        self.num_lines += 1
        if self._checked and line.text is not None:
            return GoodLine(line.number, _decoder.decode(line.text).custom_id, line.start, line.num_bytes)
        if self.num_lines > self._limits.max_lines:
            self.complain(
                None, "too_many_lines", f"the file has more than {self._limits.max_lines:,} requests; split it"
            )
            return None
        try:
            return self._check(line)
        except BadRequest as exc:
            self.complain(line.number, exc.code, exc.message, exc.param)
        if len(self.errors) == MAX_ERRORS:
            self.complain(None, TOO_MANY, f"more than {MAX_ERRORS} lines are wrong; only these are listed")
        return None

    def finish(self) -> None:
        """Finish after the last line: record an error for an empty file."""
        if self.num_lines == 0:
            self.complain(None, "empty_file", "the file has no lines; write one request per line")

    def _check(self, raw: RawLine) -> GoodLine:
        line = read_line(raw, self._limits.max_line_bytes, self._limits.max_json_depth)
        if line.url != self._endpoint.path:
            raise BadRequest(
                f"'url' is {line.url[:64]!r}, but the batch is for {self._endpoint.path}; one batch has one endpoint",
                param="url",
                code="mismatched_endpoint",
            )
        check_unused(line.custom_id, raw.number, self._seen)
        decode_body_of_line(self._endpoint, bytes(line.body), self._limits.max_json_depth, self._limits.shape)
        return GoodLine(raw.number, line.custom_id, raw.start, raw.num_bytes)

    def complain(self, number: int | None, code: str, message: str, param: str | None = None) -> None:
        """Record an error of a line, or of the whole file."""
        self.errors.append({"code": code, "line": number, "message": message, "param": param})


def read_line(raw: RawLine, max_bytes: int, max_depth: int) -> Line:
    """Parse a line and check its id and method. Raises BadRequest."""
    if raw.text is None:
        raise BadRequest(
            f"the line is longer than the {max_bytes:,} bytes that a request may have", code="line_too_large"
        )
    line = _decode(raw.text, max_depth)
    _check_custom_id(line.custom_id)
    if line.method != "POST":
        raise BadRequest(f"'method' must be 'POST', not {line.method[:32]!r}", param="method", code="invalid_method")
    return line


def check_unused(custom_id: str, number: int, seen: dict[str, int]) -> None:
    """Record the line of a custom id. Raises BadRequest if another line has used it."""
    first = seen.setdefault(custom_id, number)
    if first != number:
        raise BadRequest(
            f"the 'custom_id' {custom_id[:64]!r} was used in line {first} already; every line needs its own",
            param="custom_id",
            code="duplicate_custom_id",
        )


def decode_body_of_line(endpoint: BatchEndpoint, data: bytes, max_depth: int, shape: ShapeLimits) -> InferenceBody:
    """Decode and check the body of a line for its endpoint; streaming is not allowed. Raises BadRequest."""
    body = decode_body(endpoint.schema, data, max_depth, shape)
    if body.wants_stream:
        raise BadRequest("'stream' cannot be true in a batch; leave it out", param="body.stream")
    body.check()
    return body


def body_of(text: bytes) -> bytes:
    """Return the body of a line that was found valid."""
    return bytes(_decoder.decode(text).body)


_decoder = msgspec.json.Decoder(Line)


def _decode(text: bytes, max_depth: int) -> Line:
    check_depth(text, max_depth)
    try:
        return _decoder.decode(text)
    except msgspec.ValidationError as exc:
        raise BadRequest(
            f"the line must have 'custom_id', 'method' and 'url' (strings) and 'body' (an object): {exc}",
            code="invalid_line",
        ) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequest(
            f"the line is not valid JSON ({exc}); write one JSON object per line, in UTF-8", code="invalid_json_line"
        ) from exc


def _check_custom_id(custom_id: str) -> None:
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_LENGTH or not custom_id.isprintable():
        raise BadRequest(
            f"'custom_id' must have 1 to {MAX_CUSTOM_ID_LENGTH} printable characters",
            param="custom_id",
            code="invalid_custom_id",
        )
