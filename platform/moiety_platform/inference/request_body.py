"""Reads and validates request bodies. Every error is a BadRequest that names the field and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from litestar.types import Receive
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from moiety_platform.admission.gate import TenantRoundRobin
from moiety_platform.errors import BadRequest, TooLarge
from moiety_platform.inference.body_fields import StrictBody
from moiety_platform.inference.response import ClientDisconnected
from moiety_platform.inference.shape_limits import DEFAULT_SHAPE, ShapeLimits
from moiety_platform.json_depth import check_depth
from moiety_platform.settings import GatewaySettings

MAX_EXCESS_FACTOR = 16  # times the limit, up to which an excessive body is read
INLINE_BYTES = 64 * 1024  # larger bodies are decoded in a thread
MAX_NAME_CHARS = 64  # of a field name in an error message
MAX_NAMED_PROBLEMS = 8  # in an error message
MAX_PROBLEM_CHARS = 1024  # of each, in which a client's own words may be repeated

Body = TypeVar("Body", bound=StrictBody)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of request bodies."""

    max_body_bytes: int
    max_json_depth: int
    shape: ShapeLimits

    @classmethod
    def of(cls, settings: GatewaySettings) -> BodyLimits:
        return cls(settings.max_body_bytes, settings.max_json_depth, ShapeLimits.of(settings))


class BodyReader:
    """Reader of request bodies of one gateway process. `limits` may be replaced, for later requests."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self._turns = TenantRoundRobin()

    async def read(self, schema: type[Body], receive: Receive, fields: Mapping[bytes, bytes], tenant_id: str) -> Body:
        """Read the body, wait for the tenant's turn, and decode it, in a thread if it is large.

        `fields` are the header fields by name. Raises the errors of `read_body` and `decode_body`.
        """
        limits = self.limits
        data = await read_body(receive, fields.get(b"content-length", b""), limits.max_body_bytes)
        await self._turns.wait(tenant_id)
        if len(data) <= INLINE_BYTES:
            return decode_body(schema, data, limits.max_json_depth, limits.shape)
        return await asyncio.to_thread(decode_body, schema, data, limits.max_json_depth, limits.shape)


async def read_body(receive: Receive, content_length: bytes, max_bytes: int) -> bytes:
    """Return the whole body. `content_length` is the header field, empty if there is none.

    Raises TooLarge, or ClientDisconnected if the client disconnects. A body that is too large is read and discarded up
    to MAX_EXCESS_FACTOR times the limit, since a client that is cut off while it sends does not see the error.
    """
    max_read_bytes = MAX_EXCESS_FACTOR * max_bytes
    if content_length.isdigit() and int(content_length[:20]) > max_read_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    while size <= max_read_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        if message["type"] != "http.request":
            continue
        size += len(message["body"])
        if size <= max_bytes:
            chunks.append(message["body"])
        else:
            chunks.clear()
        if not message["more_body"]:
            break
    if size > max_bytes:
        raise _too_large(max_bytes)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than the {max_bytes} bytes that this server accepts; send less")


def decode_body(schema: type[Body], data: bytes, max_depth: int, shape: ShapeLimits = DEFAULT_SHAPE) -> Body:
    """Return the body as `schema`. Raises BadRequest.

    Validation holds the GIL, in a thread too, so its cost is bounded: by the check of nesting depth and number of
    containers here, by the limits of the schema, and by lists whose validation stops at the first bad entry.
    """
    if data.count(b"[") + data.count(b"{") > max_depth:  # most bodies have fewer brackets than that
        check_depth(data, max_depth)
    try:
        try:
            return schema.model_validate_json(data, context=shape)
        except ValidationError:
            translated = schema.translated(data)
            if translated is None:
                raise
            return schema.model_validate_json(translated, context=shape)
    except ValidationError as exc:
        raise _translate(exc, schema.forms, shape) from exc


def _translate(exc: ValidationError, forms: Mapping[str, str], shape: ShapeLimits) -> BadRequest:
    """Return one error that names all problems of the body, at most MAX_NAMED_PROBLEMS, and counts the others."""
    errors = exc.errors(include_url=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        reason = errors[0]["msg"].removeprefix("Invalid JSON: ")
        return BadRequest(f"the body is not valid JSON ({reason}); send one JSON object in UTF-8", code="invalid_json")
    if errors[0]["type"] != "refused" and not errors[0]["loc"]:
        return BadRequest("the body must be a JSON object; send one with at least 'model'", code="invalid_json")
    named: dict[str, _Problem] = {}
    others: set[str] = set()
    for error in errors:
        path, form = _path(error["loc"], error["type"], forms)
        key = path or error["msg"]
        if key in named:
            continue  # another type of the same field
        if len(named) == MAX_NAMED_PROBLEMS:
            others.add(key)
            continue
        complaint = _complaint(error, shape) if form is None else form.format(**asdict(shape))
        text = f"'{path}' {complaint}" if path else error["msg"]
        named[key] = _Problem(text[:MAX_PROBLEM_CHARS], path or None, error.get("ctx", {}).get("code"))
    return _error_of(list(named.values()), len(others))


@dataclass(frozen=True, slots=True)
class _Problem:
    text: str
    param: str | None
    code: str | None


def _error_of(problems: Sequence[_Problem], num_others: int) -> BadRequest:
    """Return the error for all problems. Its parameter and its code are those of the first one."""
    first = problems[0]
    if len(problems) == 1:
        return BadRequest(first.text, code=first.code, param=first.param)
    listed = "; ".join(f"({number}) {problem.text}" for number, problem in enumerate(problems, 1))
    more = f"; and {num_others:,} more" if num_others else ""
    message = f"the body has {len(problems) + num_others:,} problems: {listed}{more}"
    return BadRequest(message, code=first.code, param=first.param)


def _path(location: tuple[int | str, ...], kind: str, forms: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the field's path, and its error message if it accepts several types.

    The rest of such a location is pydantic's own. An error of the field itself, not of one of its types, has its own
    message.
    """
    for i, part in enumerate(location):
        is_own = kind in ("missing", "refused") and i == len(location) - 1
        if part in forms and (part != "content" or i == 2) and not is_own:
            return _join(location[: i + 1]), forms[str(part)]
    return _join(location), None


def _join(location: tuple[int | str, ...]) -> str:
    """Return a location as a path. Keys are shortened, since a client's key may be of any length."""
    return ".".join(str(part)[:MAX_NAME_CHARS] for part in location)


def _complaint(error: ErrorDetails, shape: ShapeLimits) -> str:
    if error["type"] == "missing":
        return "is missing; it is required"
    if error["type"] == "refused":
        return f"cannot be served: {error['msg']}"
    if error["type"] == "too_short":
        return "is empty; it needs at least one entry"
    if error["type"] == "too_long":
        by_setting = {
            "messages": shape.max_messages,
            "input": shape.max_messages,
            "stop_sequences": shape.max_stop_strings,
            "tools": shape.max_tools,
        }
        most = by_setting.get(str(error["loc"][-1]), error["ctx"]["max_length"])
        return f"is too long; it may have {most:,} entries"
    message = error["msg"]
    return message.replace("Input should", "must") if message.startswith("Input should") else f"is invalid: {message}"
