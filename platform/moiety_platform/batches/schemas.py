"""Request and response schemas of the batch API, in OpenAI's shape."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict, cast

from msgspec import Meta
from pydantic import StringConstraints, field_validator

from moiety_platform.batches.endpoints import ENDPOINTS
from moiety_platform.batches.models import Batch, BatchStatus
from moiety_platform.files.upload import MAX_EXPIRY_S, MIN_EXPIRY_S, check_expiry
from moiety_platform.inference.body_fields import MetadataPairs, StrictBody, refuse, shows

COMPLETION_WINDOW = "24h"
WINDOW_MS = 24 * 3600 * 1000


class ExpiresAfter(StrictBody):
    anchor: Annotated[str, shows(enum=["created_at"])]
    seconds: Annotated[int, shows(minimum=MIN_EXPIRY_S, maximum=MAX_EXPIRY_S)]


class NewBatch(StrictBody):
    """Body of `POST /v1/batches`."""

    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    endpoint: Annotated[str, shows(enum=list(ENDPOINTS))]
    completion_window: Annotated[str, shows(enum=[COMPLETION_WINDOW])]
    metadata: MetadataPairs | None = None
    output_expires_after: ExpiresAfter | None = None

    @field_validator("endpoint")
    @classmethod
    def _known_endpoint(cls, value: str) -> str:
        if value not in ENDPOINTS:
            raise refuse(f"it must be one of {', '.join(ENDPOINTS)}")
        return value

    @field_validator("completion_window")
    @classmethod
    def _one_window(cls, value: str) -> str:
        if value != COMPLETION_WINDOW:
            raise refuse(f"it must be '{COMPLETION_WINDOW}'")
        return value

    @property
    def output_expires_s(self) -> int | None:
        """Return the requested lifetime of the result files in seconds; None if there is none. Raises BadRequest."""
        expiry = self.output_expires_after
        return None if expiry is None else check_expiry(expiry.anchor, expiry.seconds, "output_expires_after")


class BatchError(TypedDict):
    """Error of the input file, and the line in which it is."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(TypedDict):
    """Reasons why a batch was refused."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(TypedDict):
    """Counts of the batch's lines."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(TypedDict):
    """Input tokens that were in the prefix cache."""

    cached_tokens: int


class OutputTokensDetails(TypedDict):
    """Output tokens by kind; reasoning tokens are always 0."""

    reasoning_tokens: int


class BatchUsage(TypedDict):
    """Usage of the answered lines, which are those that were billed."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchObject(TypedDict):
    """A batch. Times are Unix seconds."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Annotated[str, Meta(extra_json_schema={"enum": list(BatchStatus)})]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None


def view(batch: Batch) -> BatchObject:
    """Return a batch in the shape of OpenAI's API."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": cast("list[BatchError]", batch.errors)} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": COMPLETION_WINDOW,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_ms // 1000,
        "expires_at": batch.expires_ms // 1000,
        "in_progress_at": _seconds(batch.in_progress_ms),
        "finalizing_at": _seconds(batch.finalizing_ms),
        "completed_at": _seconds(batch.completed_ms),
        "failed_at": _seconds(batch.failed_ms),
        "expired_at": _seconds(batch.expired_ms),
        "cancelling_at": _seconds(batch.cancelling_ms),
        "cancelled_at": _seconds(batch.cancelled_ms),
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": None if batch.status == BatchStatus.VALIDATING else _usage(batch),
        "metadata": batch.note,
    }


def _usage(batch: Batch) -> BatchUsage:
    """Return the usage of the answered lines, which are those that were billed."""
    return {
        "input_tokens": batch.prompt_tokens,
        "input_tokens_details": {"cached_tokens": batch.cached_tokens},
        "output_tokens": batch.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": batch.prompt_tokens + batch.output_tokens,
    }


def _seconds(moment_ms: int | None) -> int | None:
    return None if moment_ms is None else moment_ms // 1000
