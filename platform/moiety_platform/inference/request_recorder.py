"""Records the end of each request exactly once.

Usage row, metrics, span and log line are written in one place when the request's context exits, for whatever reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

import msgspec
import structlog

from moiety_platform.auth.principal import Principal
from moiety_platform.clock import Clock
from moiety_platform.errors import PlatformError, Unavailable
from moiety_platform.http_errors import internal_error
from moiety_platform.inference.quota_reservation import QuotaReservation, UsedTokens
from moiety_platform.inference.request_record import RequestRecord, settle
from moiety_platform.inference.request_spans import spans_of
from moiety_platform.inference.response import ClientDisconnected
from moiety_platform.metrics import Metrics
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.lease import Charge
from moiety_platform.quotes.guarantee import GuaranteeOutcome
from moiety_platform.randomness import ordered_hex
from moiety_platform.receipts.capture import RECEIPT_FIELD, RECEIPT_TAG, draft_of, wants_receipt
from moiety_platform.request_contents.writer import ContentWriter
from moiety_platform.settings import GatewaySettings
from moiety_platform.traces.sampling import EndedRequest
from moiety_platform.traces.tracing import Phase, RequestTrace, Tracing
from moiety_platform.usage.billing_context import BillingContext
from moiety_platform.usage.row import KILLED, UsageRow

STOPPING = Unavailable("the server is shutting down; send the request again", code="server_stopping", retry_after_s=1)
FIRST_ERROR_STATUS = 400

log = structlog.get_logger(__name__)


class UsageSink(Protocol):
    """Non-blocking sink of usage rows."""

    def opened(self, row: UsageRow) -> None: ...

    def record(self, row: UsageRow, when_stored: Callable[[], None] | None = None) -> None: ...


@dataclass(eq=False, repr=False)
class RequestRecorder:
    """Opens and closes the request records of one gateway process."""

    usage: UsageSink
    quotas: QuotaEnforcer
    metrics: Metrics
    tracing: Tracing
    clock: Clock
    contents: ContentWriter | None = None  # of requests whose tenants opted in

    def __post_init__(self) -> None:
        self.access_log_rate = 1.0  # fraction of the successful requests that are logged
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def use(self, settings: GatewaySettings) -> None:
        """Log requests as these settings say."""
        self.access_log_rate = settings.access_log_rate

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return self._num_open

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no record is open or the timeout expires, and return whether none is open."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def open(
        self,
        principal: Principal,
        *,
        request_id: str,
        client_request_id: str,
        operation: str,
        endpoint: str,
        traceparent: bytes | None,
        status_of: Callable[[PlatformError], int],
        bills_failures: bool = True,
    ) -> OpenRecord:
        """Return a record for an authenticated request.

        `status_of` returns the HTTP status of an error in the request's API. Exiting the record writes the one usage
        row, and errors propagate. Without `bills_failures` only a complete answer is billed, and tokens generated
        before a failure are neither billed nor charged.
        """
        arrival_unix_ns = self.clock.unix_ns()
        record = RequestRecord(
            request_id=request_id,
            client_request_id=client_request_id,
            operation=operation,
            endpoint=endpoint,
            principal=principal,
            trace=self.tracing.start(
                None if traceparent is None else traceparent.decode("latin-1"), arrival_unix_ns, self.clock.unix_ns
            ),
            started_at=datetime.fromtimestamp(arrival_unix_ns / 1e9, UTC),
            started_s=self.clock.monotonic(),
            arrival_unix_ns=arrival_unix_ns,
            on_submitted=self.usage.opened,
            make_bill=self._bill,
            status_of=status_of,
            reservation=QuotaReservation(self.quotas, principal),
            service_class=principal.service_class,
            bills_failures=bills_failures,
        )
        return OpenRecord(self, record)

    def copy_of(self, record: RequestRecord) -> RequestRecord:
        """Return a record for a copy of the request, of which nothing is counted, billed, charged or traced.

        It is never closed. Its caller may use every model.
        """
        principal = dataclasses.replace(record.principal, allowed_models=None)
        arrival_unix_ns = self.clock.unix_ns()
        return RequestRecord(
            request_id=f"shadow-{ordered_hex()}",
            client_request_id=record.client_request_id,
            operation=record.operation,
            endpoint=record.endpoint,
            principal=principal,
            trace=RequestTrace(None, arrival_unix_ns, self.clock.unix_ns, is_recorded=False),
            started_at=datetime.fromtimestamp(arrival_unix_ns / 1e9, UTC),
            started_s=self.clock.monotonic(),
            arrival_unix_ns=arrival_unix_ns,
            on_submitted=_ignore_row,
            make_bill=self._bill,
            status_of=record.status_of,
            reservation=QuotaReservation(self.quotas, principal, scopes=()),
            service_class=principal.service_class,
            bills_failures=False,
        )

    def begin(self) -> None:
        """Count one more open record."""
        self._num_open += 1
        self._idle.clear()

    def end(self, record: RequestRecord) -> None:
        """Close a record and write its usage row, metrics, spans and, if it is sampled, its log line."""
        try:
            self._store_usage(record)
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    def _store_usage(self, record: RequestRecord) -> None:
        record.trace.enter(Phase.SETTLE)
        used = record.used
        cost = record.reservation.cost(used)
        outcome = None
        if record.quote is not None:
            outcome = record.guarantee_outcome(record.quote, cost, self.clock.monotonic())
            cost -= outcome.credit_nanodollars
        row = self._row(record, used, cost, record.reservation.settle(used, cost))
        if outcome is not None:
            row = with_guarantee(row, outcome)
        if (RECEIPT_FIELD in record.fields or RECEIPT_TAG in (record.attribution.tags or "")) and wants_receipt(record):
            row = msgspec.structs.replace(row, receipt=draft_of(record))
        if record.agent_run is not None:
            record.agent_run.on_end(row)
        # not a method of the record, which would keep the whole request in memory until its row is stored
        self.usage.record(row, partial(settle, record.sequences) if record.sequences else None)
        if record.content is not None and self.contents is not None:
            self.contents.put(row.request_id, record.content)
        self.metrics.observe(row, record.operation, record.base_model, _tpot_s(record))
        if outcome is not None:
            self.metrics.observe_quote(row, record.base_model)
        if record.route is not None:
            self.metrics.observe_route(record.route, record.base_model, row.outcome)
            for fallback in record.route_fallbacks:
                self.metrics.observe_route_fallback(record.route, fallback.model, fallback.cause)
        for failover in record.failovers:
            self.metrics.observe_failover(record.base_model, failover.cause)
        if record.admission_outcome and record.chosen is not None:
            self.metrics.observe_admission(record.chosen.name, record.admission_outcome, record.admission_reason)
        self._end_trace(record, row)
        rate = self.access_log_rate
        if rate < 1 and row.http_status < FIRST_ERROR_STATUS and random.random() >= rate:
            return
        log.info(
            "request",
            request_id=row.request_id,
            client_request_id=record.client_request_id,
            trace_id=record.trace.trace_id,
            tenant_id=row.tenant_id,
            endpoint=row.endpoint,
            model=record.served_model,
            route=record.route,
            outcome=row.outcome,
            status=row.http_status,
            error_code=row.error_code,
            service_class=row.service_class,
            reason=record.admission_reason or None,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            failovers=len(record.failovers) or None,
            recomputed_tokens=record.num_recomputed_tokens or None,
            ms=round(row.duration_ms, 1),
        )

    def _end_trace(self, record: RequestRecord, row: UsageRow) -> None:
        if not record.trace.is_recorded:
            return
        ended_ns = self.clock.unix_ns()
        ending = EndedRequest(
            trace_id=record.trace.trace_id,
            salt=record.principal.cache_salt,
            service_class=row.service_class,
            has_failed=row.outcome == "failed",
            slo_attained=row.slo_attained,
            num_preemptions=row.num_preemptions,
            num_failovers=len(record.failovers),
        )
        self.tracing.end(ending, self.clock.monotonic(), lambda verdict: spans_of(record, row, verdict, ended_ns))

    def _bill(self, record: RequestRecord, num_prompt_tokens: int) -> BillingContext:
        reservation, used = record.reservation, UsedTokens(record.service_class, num_prompt_tokens, 0, 0)
        cost = reservation.cost(used)
        principal, generation = record.principal, record.generation
        row = UsageRow(
            request_id=record.request_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            endpoint=record.endpoint,
            model=record.served_model,
            service_class=used.service_class,
            started_at=record.started_at,
            num_choices=record.num_sequences,
            prompt_tokens=num_prompt_tokens,
            cost_nanodollars=cost,
            end_user=record.principal.end_user or record.attribution.end_user,  # a token's is verified
            tags=record.attribution.tags,
            route=record.route,
            spot_percent=None if record.chosen is None or not record.chosen.spot else record.spot_percent,
            trace_id=record.trace.trace_id if record.trace.is_recorded else None,
            charges=reservation.charges(used, cost),
            **KILLED,
        )
        return BillingContext(
            row,
            reservation.prices,
            reservation.stocks,
            self.quotas.replica_id,
            generation.num_choices if generation else 1,
        )

    def _row(self, record: RequestRecord, used: UsedTokens, cost: int, charges: tuple[Charge, ...]) -> UsageRow:
        principal, generation, now_s = record.principal, record.generation, self.clock.monotonic()
        ttft_s = None if record.first_token_s is None else record.first_token_s - record.started_s
        return UsageRow(
            request_id=record.request_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            endpoint=record.endpoint,
            model=record.served_model if generation else "",  # never a client's name of a nonexistent model
            service_class=used.service_class,
            started_at=record.started_at,
            outcome=record.outcome,
            http_status=record.http_status,
            num_choices=record.num_sequences,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            queue_ms=record.queue_ms,
            ttft_ms=None if ttft_s is None else ttft_s * 1000,
            duration_ms=(now_s - record.started_s) * 1000,
            error_code=record.error_code,
            num_preemptions=record.num_preemptions,
            slo_attained=record.slo_attained(now_s),
            cost_nanodollars=cost,
            speculative_used_tokens=record.num_speculative_tokens,
            expert_read_bytes=record.expert_read_bytes,
            expert_moved_bytes=record.expert_moved_bytes,
            end_user=record.principal.end_user or record.attribution.end_user,  # a token's is verified
            tags=record.attribution.tags,
            route=record.route,
            spot_percent=None if record.chosen is None or not record.chosen.spot else record.spot_percent,
            trace_id=record.trace.trace_id if record.trace.is_recorded else None,
            charges=charges,
        )


class OpenRecord:
    """Context of an open record. The way it exits determines how the request ended."""

    __slots__ = ("_record", "_recorder")

    def __init__(self, recorder: RequestRecorder, record: RequestRecord) -> None:
        self._recorder, self._record = recorder, record

    @property
    def unopened(self) -> RequestRecord:
        """The record of a request that is not served and leaves no usage row, such as a quote's."""
        return self._record

    def __enter__(self) -> RequestRecord:
        self._recorder.begin()
        return self._record

    def __exit__(self, _type: object, exc: BaseException | None, _traceback: object) -> None:
        record = self._record
        if isinstance(exc, ClientDisconnected):
            record.disconnected()
        elif isinstance(exc, asyncio.CancelledError):  # the server stops after its drain timeout
            record.failed(STOPPING)
        elif isinstance(exc, PlatformError):
            record.failed(exc)
        elif isinstance(exc, Exception):  # internal error: recorded here, logged by the pipeline
            record.failed(internal_error())
        self._recorder.end(record)


def with_guarantee(row: UsageRow, outcome: GuaranteeOutcome) -> UsageRow:
    """Return the row with what the request's quote came to. Its cost already lacks the credit."""
    return msgspec.structs.replace(
        row,
        guarantee_met=outcome.is_met,
        predicted_ttft_ms=outcome.predicted_ttft_ms,
        predicted_duration_ms=outcome.predicted_duration_ms,
        credit_nanodollars=outcome.credit_nanodollars,
        credit_reason=outcome.reason,
    )


def _ignore_row(_row: UsageRow) -> None:
    """Do nothing with the row of a copy, which is not billed."""


def _tpot_s(record: RequestRecord) -> float | None:
    """Return the mean time between the tokens of one sequence, without the first, in seconds."""
    if record.first_token_s is None or record.last_token_s is None or record.generation is None:
        return None
    num_gaps = record.output_tokens // record.num_sequences - 1
    return (record.last_token_s - record.first_token_s) / num_gaps if num_gaps > 0 else None
