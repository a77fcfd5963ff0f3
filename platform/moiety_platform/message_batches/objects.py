"""Message Batches in Anthropic's fields: the body of a new one, the objects, and the lines of results. Pure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta
from pydantic import Field

from moiety_platform.anthropic_api.answer_types import Message
from moiety_platform.anthropic_api.errors import AnthropicErrorBody, anthropic_error_body
from moiety_platform.anthropic_api.schemas import MessagesBody
from moiety_platform.batches.closing import EXPIRED
from moiety_platform.batches.endpoints import ENDPOINTS
from moiety_platform.batches.input_lines import Checker, RawLine
from moiety_platform.batches.line_limits import BatchLineLimits
from moiety_platform.batches.models import MAX_CUSTOM_ID_LENGTH, OPEN, Batch, BatchStatus
from moiety_platform.batches.service import CANCELLED
from moiety_platform.errors import BadRequest
from moiety_platform.inference.body_fields import StrictBody, shows
from moiety_platform.openapi.schemas import either
from moiety_platform.request_head import MESSAGES_PATH

BATCHES_PATH = f"{MESSAGES_PATH}/batches"
MAX_ERRORS = 8  # of a new batch, that are named

Count = Annotated[int, Meta(extra_json_schema={"minimum": 0})]


class BatchedMessage(StrictBody):
    """One request of a batch."""

    custom_id: Annotated[str, shows(minLength=1, maxLength=MAX_CUSTOM_ID_LENGTH, format="printable")]
    params: MessagesBody


class NewMessageBatch(StrictBody):
    """`POST /v1/messages/batches`. It documents the body, which is decoded request by request."""

    requests: Annotated[list[BatchedMessage], Field(min_length=1)]


class _Request(msgspec.Struct):
    custom_id: str
    params: msgspec.Raw


class _NewBatch(msgspec.Struct):
    requests: list[_Request]


class MessageBatchCounts(TypedDict):
    """Numbers of requests by their state. All are processing until the batch has ended."""

    processing: Count
    succeeded: Count
    errored: Count
    canceled: Count
    expired: Count


class MessageBatch(TypedDict):
    """A batch of messages. Times are in RFC 3339."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatchPage(TypedDict):
    """A page of batches, newest first. The ids are those of its first and its last batch."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(TypedDict):
    """A deleted batch."""

    id: str
    type: Literal["message_batch_deleted"]


class SucceededResult(TypedDict):
    """Result of an answered request."""

    type: Literal["succeeded"]
    message: Message


class ErroredResult(TypedDict):
    """Result of a request that failed."""

    type: Literal["errored"]
    error: AnthropicErrorBody


class UnansweredResult(TypedDict):
    """Result of a request that was not answered before its batch was canceled or had expired."""

    type: Literal["canceled", "expired"]


class MessageBatchResult(TypedDict):
    """One line of the results."""

    custom_id: str
    result: Annotated[Any, either(SucceededResult, ErroredResult, UnansweredResult)]


class _LineError(msgspec.Struct):
    message: str
    code: str
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _LineError


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _ResultLine(msgspec.Struct):
    custom_id: str
    response: _Response | None
    error: _LineError | None


_new_batch = msgspec.json.Decoder(_NewBatch)
_result_line = msgspec.json.Decoder(_ResultLine)
_error_body = msgspec.json.Decoder(_ErrorBody)


def input_file_of(data: bytes, limits: BatchLineLimits) -> tuple[bytes, int]:
    """Return the input file of a new batch, and the number of its lines, one for each request.

    Raises BadRequest, which names the bad requests, at most MAX_ERRORS.
    """
    try:
        requests = _new_batch.decode(data).requests
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(
            f"the body must be a JSON object with 'requests', a list of objects with 'custom_id' and 'params': {exc}",
            code="invalid_json",
        ) from exc
    if not requests:
        raise BadRequest("'requests' is empty; it needs at least one entry", param="requests")
    if len(requests) > limits.max_lines:
        raise BadRequest(f"'requests' is too long; it may have {limits.max_lines:,} entries", param="requests")
    checker = Checker(ENDPOINTS[MESSAGES_PATH], limits)
    content = bytearray()
    for number, request in enumerate(requests, 1):
        line = _input_line(request)
        checker.check(RawLine(number, len(content), line if len(line) <= limits.max_line_bytes else None))
        content += line + b"\n"
        if len(checker.errors) >= MAX_ERRORS:
            break
    if checker.errors:
        named = "; ".join(f"'requests.{error['line'] - 1}': {error['message']}" for error in checker.errors)
        first = checker.errors[0]
        raise BadRequest(
            f"some requests are invalid; correct them: {named}",
            code=first["code"],
            param=f"requests.{first['line'] - 1}",
        )
    return bytes(content), len(requests)


def _input_line(request: _Request) -> bytes:
    try:
        body = msgspec.Raw(msgspec.json.format(bytes(request.params), indent=-1))  # in one line
    except RecursionError as exc:
        raise BadRequest(f"the request {request.custom_id[:64]!r} is nested too deeply; flatten it") from exc
    line = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES_PATH, "body": body}
    return msgspec.json.encode(line)


def message_batch(batch: Batch, num_unanswered: int) -> MessageBatch:
    """Return a batch. `num_unanswered` is the number of its lines that got no answer before its end."""
    is_open = batch.status in OPEN
    ended_ms = next(
        (one for one in (batch.completed_ms, batch.failed_ms, batch.expired_ms, batch.cancelled_ms) if one), None
    )
    is_cancelled, is_expired = batch.status == BatchStatus.CANCELLED, batch.status == BatchStatus.EXPIRED
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": (
            "canceling" if batch.status == BatchStatus.CANCELLING else "in_progress" if is_open else "ended"
        ),
        "request_counts": {
            "processing": batch.total if is_open else 0,
            "succeeded": 0 if is_open else batch.completed,
            "errored": 0 if is_open else batch.failed - (num_unanswered if is_cancelled or is_expired else 0),
            "canceled": num_unanswered if is_cancelled else 0,
            "expired": num_unanswered if is_expired else 0,
        },
        "created_at": _moment(batch.created_ms),
        "expires_at": _moment(batch.expires_ms),
        "ended_at": None if is_open or ended_ms is None else _moment(ended_ms),
        "cancel_initiated_at": None if batch.cancelling_ms is None else _moment(batch.cancelling_ms),
        "archived_at": None,
        "results_url": None if is_open else f"{BATCHES_PATH}/{batch.id}/results",
    }


async def results_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of results for the lines of a batch's output or error file."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield _result_of(line)


def _result_of(line: bytes) -> bytes:
    ended = _result_line.decode(line)
    return msgspec.json.encode({"custom_id": ended.custom_id, "result": _outcome_of(ended)}) + b"\n"


def _outcome_of(ended: _ResultLine) -> dict[str, Any]:
    response, error = ended.response, ended.error
    if response is not None and response.status_code == 200:
        return {"type": "succeeded", "message": response.body}
    if response is not None:
        failure = _error_body.decode(response.body).error
        body = anthropic_error_body(
            response.status_code, failure.message, failure.code, response.request_id, failure.param
        )
        return {"type": "errored", "error": body}
    assert error is not None, "a line without a response has an error"
    for kind, unanswered in (("canceled", CANCELLED), ("expired", EXPIRED)):
        if error.code == unanswered["code"]:
            return {"type": kind}
    return {"type": "errored", "error": anthropic_error_body(500, error.message, error.code, None)}


def _moment(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
