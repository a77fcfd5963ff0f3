"""The account of one request: what is known of it so far, and its end told exactly once to everyone who asks.

Usage row, metrics, span and log line are written in one place, when the request's context is left, however it is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

import structlog

from moiety_platform.auth.principal import Principal
from moiety_platform.clock import Clock
from moiety_platform.completions.disconnect import ClientDisconnected
from moiety_platform.completions.generation import Generation
from moiety_platform.errors import PlatformError, Unavailable
from moiety_platform.metrics import Metrics
from moiety_platform.traces.tracing import RequestSpan, Tracing
from moiety_platform.usage.row import UsageRow

CLIENT_CLOSED_REQUEST = 499
PROVIDER = "moiety"

STOPPING = Unavailable("the server is stopping; send the request again", code="server_stopping", retry_after_s=1)

log = structlog.get_logger(__name__)


class UsageSink(Protocol):
    """Takes usage rows without blocking."""

    def opened(self, row: UsageRow) -> None: ...

    def record(self, row: UsageRow) -> None: ...


@dataclass(slots=True)
class RequestRecord:
    """Owned by the controller that opened it; the pipeline fills in what it learns."""

    request_id: str
    client_request_id: str
    operation: str
    endpoint: str
    principal: Principal
    span: RequestSpan
    started_at: datetime
    started_s: float  # monotonic
    arrival_unix_ns: int
    on_submitted: Callable[[RequestRecord], None]
    generation: Generation | None = None
    served_model: str = "unknown"
    reached_engine: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_ms: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    answered_status: int | None = None  # what the client has been sent already
    outcome: str = ""
    http_status: int = 0
    error_code: str | None = None

    def submitted(self, num_prompt_tokens: int) -> None:
        """A sequence has been given to an engine; from here on the request counts, even if this process is killed."""
        is_first = not self.reached_engine
        self.reached_engine, self.prompt_tokens = True, num_prompt_tokens
        if is_first:
            self.on_submitted(self)

    def completed(self) -> None:
        """All choices came to their end."""
        self.outcome = "length" if "length" in self.finish_reasons else "stop"
        self.http_status = 200

    def disconnected(self) -> None:
        self.outcome, self.http_status, self.error_code = "disconnected", CLIENT_CLOSED_REQUEST, "client_disconnected"

    def failed(self, status: int, code: str) -> None:
        refused = not self.reached_engine and status != 500
        self.outcome = "rejected" if refused else "failed"
        self.http_status = self.answered_status or status
        self.error_code = code


class RequestRecorder:
    """Opens and closes the records of one gateway process."""

    def __init__(self, usage: UsageSink, metrics: Metrics, tracing: Tracing, clock: Clock) -> None:
        self._usage = usage
        self._metrics = metrics
        self._tracing = tracing
        self._clock = clock
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Return when no record is open, or after the timeout; says which."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def open(
        self,
        principal: Principal,
        *,
        request_id: str,
        client_request_id: str,
        operation: str,
        endpoint: str,
        traceparent: str | None,
        tracestate: str | None,
    ) -> AsyncIterator[RequestRecord]:
        """A record for an authenticated request. Leaving it writes the one usage row; errors pass through."""
        record = RequestRecord(
            request_id=request_id,
            client_request_id=client_request_id,
            operation=operation,
            endpoint=endpoint,
            principal=principal,
            span=self._tracing.start_request(operation, traceparent, tracestate),
            started_at=self._clock.now(),
            started_s=self._clock.monotonic(),
            arrival_unix_ns=self._clock.unix_ns(),
            on_submitted=lambda record: self._usage.opened(self._row(record)),
        )
        self._num_open += 1
        self._idle.clear()
        try:
            yield record
        except ClientDisconnected:
            record.disconnected()
            raise
        except asyncio.CancelledError:  # the server stops, and its time to drain is over
            record.failed(STOPPING.status, STOPPING.code)
            raise
        except PlatformError as exc:
            record.failed(exc.status, exc.code)
            raise
        except Exception:
            record.failed(PlatformError.status, PlatformError.default_code)
            raise
        finally:
            self._close(record)
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    def _close(self, record: RequestRecord) -> None:
        row = self._row(record)
        self._usage.record(row)
        self._metrics.observe(row, record.served_model, _tpot_s(record))
        _describe_span(record)
        record.span.end(record.error_code)
        log.info(
            "request",
            request_id=row.request_id,
            client_request_id=record.client_request_id,
            tenant_id=row.tenant_id,
            endpoint=row.endpoint,
            model=record.served_model,
            outcome=row.outcome,
            status=row.http_status,
            error_code=row.error_code,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            ms=round(row.duration_ms, 1),
        )

    def _row(self, record: RequestRecord) -> UsageRow:
        principal, generation = record.principal, record.generation
        ttft_s = None if record.first_token_s is None else record.first_token_s - record.started_s
        return UsageRow(
            request_id=record.request_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            endpoint=record.endpoint,
            model=generation.model if generation else "",
            service_class=principal.service_class,
            started_at=record.started_at,
            outcome=record.outcome,
            http_status=record.http_status,
            num_choices=generation.num_sequences if generation else 0,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            queue_ms=record.queue_ms,
            ttft_ms=None if ttft_s is None else ttft_s * 1000,
            duration_ms=(self._clock.monotonic() - record.started_s) * 1000,
            error_code=record.error_code,
        )


def _tpot_s(record: RequestRecord) -> float | None:
    """Mean time between the tokens of one sequence, after the first."""
    if record.first_token_s is None or record.last_token_s is None or record.generation is None:
        return None
    num_gaps = record.output_tokens // record.generation.num_sequences - 1
    return (record.last_token_s - record.first_token_s) / num_gaps if num_gaps > 0 else None


def _describe_span(record: RequestRecord) -> None:
    generation = record.generation
    sampling = generation.sampling if generation else None
    record.span.describe(
        f"{record.operation} {record.served_model}",
        {
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": generation.model[:256] if generation else None,
            "gen_ai.request.choice.count": generation.num_choices if generation else None,
            "gen_ai.request.max_tokens": generation.max_tokens if generation else None,
            "gen_ai.request.temperature": sampling.temperature if sampling else None,
            "gen_ai.request.top_p": sampling.top_p if sampling else None,
            "gen_ai.request.seed": sampling.seed if sampling else None,
            "gen_ai.response.id": record.request_id,
            "gen_ai.response.model": record.served_model if record.reached_engine else None,
            "gen_ai.response.finish_reasons": record.finish_reasons or None,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "http.response.status_code": record.http_status,
            "moiety.tenant_id": record.principal.tenant_id,
            "moiety.service_class": record.principal.service_class,
            "moiety.outcome": record.outcome,
        },
    )
