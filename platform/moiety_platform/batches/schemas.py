"""What the API says and hears of batches, in OpenAI's shape."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import StringConstraints, field_validator

from moiety_platform.batches.endpoints import ENDPOINTS
from moiety_platform.batches.models import Batch, BatchStatus
from moiety_platform.completions.fields import MetadataPairs, StrictBody, refuse
from moiety_platform.errors import BadRequest
from moiety_platform.files.upload import check_expiry

COMPLETION_WINDOW = "24h"
WINDOW_MS = 24 * 3600 * 1000
_MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class ExpiresAfter(StrictBody):
    anchor: str
    seconds: int


class NewBatch(StrictBody):
    """`POST /v1/batches`."""

    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    endpoint: str
    completion_window: str
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
        """Raises BadRequest."""
        expiry = self.output_expires_after
        return None if expiry is None else check_expiry(expiry.anchor, expiry.seconds, "output_expires_after")

    @property
    def note(self) -> dict[str, str] | None:
        """The metadata. Raises BadRequest for what a database does not take."""
        for text in (part for pair in (self.metadata or {}).items() for part in pair):
            if "\0" in text:
                raise BadRequest("'metadata' must not contain NUL characters", param="metadata")
        return self.metadata


def view(batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI's API shows it."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": COMPLETION_WINDOW,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_ms // 1000,
        "expires_at": batch.expires_ms // 1000,
        **{f"{name}_at": _seconds(getattr(batch, f"{name}_ms")) for name in _MOMENTS},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": None if batch.status == BatchStatus.VALIDATING else _usage(batch),
        "metadata": batch.note,
    }


def _usage(batch: Batch) -> dict[str, Any]:
    """Of the lines that were answered, which are those that were billed."""
    return {
        "input_tokens": batch.prompt_tokens,
        "input_tokens_details": {"cached_tokens": batch.cached_tokens},
        "output_tokens": batch.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": batch.prompt_tokens + batch.output_tokens,
    }


def _seconds(moment_ms: int | None) -> int | None:
    return None if moment_ms is None else moment_ms // 1000
