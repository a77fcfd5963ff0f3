"""Record of one request: its state so far and its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from moiety_platform.agent_runs.request_of_run import RequestOfRun
from moiety_platform.auth.principal import Principal
from moiety_platform.classes.terms import Catalogue
from moiety_platform.engine_client.base import EngineClient
from moiety_platform.errors import WAIVED, Overloaded, PlatformError
from moiety_platform.inference.context_edits import AppliedEdit
from moiety_platform.inference.engine_attempts import EngineAttempt
from moiety_platform.inference.generation import Generation
from moiety_platform.inference.quota_reservation import QuotaReservation, UsedTokens
from moiety_platform.inference.response_headers import (
    ADMISSION_HEADER,
    CLASS_HEADER,
    ESTIMATE_HEADER,
    field_headers,
    route_headers,
)
from moiety_platform.inference.slo import SloProgress, slo_attained, slo_missed
from moiety_platform.quotes.guarantee import GuaranteeOutcome, SequenceTimes
from moiety_platform.quotes.quoted_request import AcceptedQuote
from moiety_platform.request_contents.terms import CapturedContent
from moiety_platform.spot.terms import SPOT_HEADER, SpotPrice
from moiety_platform.traces.tracing import RequestTrace
from moiety_platform.usage.attribution import UNATTRIBUTED, Attribution
from moiety_platform.usage.billing_context import BillingContext, encode_bill
from moiety_platform.usage.row import UsageRow
from moiety_wire.classes import ServiceClass
from moiety_wire.trace_events import Reason

CLIENT_CLOSED_REQUEST = 499
ENDED, CUTS = "stop", ("length", "content_filter")  # finish reasons that a client gets, the later the more important
COMPLETED = (ENDED, *CUTS)  # outcomes of answered requests
UNKNOWN_MODEL = "unknown"  # name of any model that does not exist


@dataclass(frozen=True, slots=True)
class Failover:
    """A sequence that moved from one engine to another, with the number of output tokens relayed before."""

    cause: str  # error code
    from_address: str
    to_address: str
    num_relayed: int
    unix_ns: int


CACHED_PART = 10  # a prompt with a larger part in the cache says nothing about the time of one without


@dataclass(frozen=True, slots=True)
class RouteFallback:
    """A model of a route that did not answer, so that the next one was tried."""

    model: str
    cause: str  # error code
    unix_ns: int


def settle(sequences: Sequence[tuple[EngineClient, str]]) -> None:
    """Tell the engines that the usage row of their sequences is stored, so that they can discard their own counts."""
    for client, sequence_id in sequences:
        client.acknowledge_usage(sequence_id)


class RequestRecord(msgspec.Struct, eq=False):
    """Record of one request. Owned by the controller that opened it and filled in by the pipeline."""

    request_id: str
    client_request_id: str
    operation: str
    endpoint: str
    principal: Principal
    trace: RequestTrace
    started_at: datetime
    started_s: float  # monotonic
    arrival_unix_ns: int
    on_submitted: Callable[[UsageRow], None]
    make_bill: Callable[[RequestRecord, int], BillingContext]
    status_of: Callable[[PlatformError], int]  # HTTP status of an error in the request's API
    reservation: QuotaReservation
    service_class: str  # name of the served class; until one is chosen, the best that the tenant may use
    bill: BillingContext | None = None  # set once the quota is reserved
    bills_failures: bool = True  # whether tokens generated before a failure are billed
    generation: Generation | None = None
    num_sequences: int = 0  # of the generation
    chosen: ServiceClass | None = None
    served: ServiceClass | None = None  # the fallback class if an engine has downgraded a sequence
    catalogue: Catalogue | None = None  # at the time when the class was chosen
    admission_outcome: str = ""  # admitted, downgraded, rejected
    admission_reason: str = ""
    served_model: str = UNKNOWN_MODEL  # the clients' name of it
    base_model: str = UNKNOWN_MODEL  # without its adapter
    route: str | None = None  # the name that the client sent, where it is a route
    route_fallbacks: list[RouteFallback] = []
    was_downgraded_by_budget: bool = False  # to the route's model for quotas that are nearly used up
    guardrails: dict[str, str] = {}  # outcome of each guardrail, the last that is not `passed`
    passed_input_guardrails: bool = False
    content: CapturedContent | None = None  # of a tenant whose contents are logged
    sequences: list[tuple[EngineClient, str]] = []  # submitted, with their ids
    reached_engine: bool = False
    was_begun: bool = False  # an engine has begun at least one sequence
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_ms: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    progress: list[SloProgress] = []  # of each sequence
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_speculative_tokens: int = 0  # prompt tokens computed by speculative prefill
    expert_read_bytes: int = 0  # bytes of experts of all sequences, at all engines that were not lost
    expert_moved_bytes: int = 0
    failovers: list[Failover] = []
    attempts: list[EngineAttempt] = []  # sequences at engines
    finish_reasons: list[str] = []
    was_cut_by_limit: bool = False  # a sequence ended because a quota was exhausted
    answered_status: int | None = None  # status already sent to the client, with the beginning of the answer
    was_kept_alive: bool = False  # a keep-alive event was sent, maybe before the answer: with status 200
    ignored_fields: list[str] = []  # of the body, by path
    adjusted_fields: dict[str, str] = {}  # values used instead of those in the body
    applied_edits: tuple[AppliedEdit, ...] = ()  # of the conversation
    attribution: Attribution = UNATTRIBUTED
    quote: AcceptedQuote | None = None  # that the request sent
    estimated_prompt_tokens: int | None = None  # reserved at a hosted provider, which alone can count them
    agent_run: RequestOfRun | None = None  # the run that the request named
    prompt_ids: Sequence[Sequence[int]] = ()  # of each prompt, once the request has ended at its engines
    output_ids: list[list[int]] = []  # of each sequence
    fields: Mapping[bytes, bytes] = {}  # of the HTTP head; none for the line of a batch
    spot_price: SpotPrice | None = None  # agreed at the admission to a spot class …
    spot_model: str = ""  # … for this model
    was_paused: bool = False  # a sequence used up its credit: a client that reads slowly, or a rate limit
    is_clients_fault: bool = False  # the error is the request's or its answer's, even after a status of 200 was sent
    outcome: str = ""
    http_status: int = 0
    error_code: str | None = None

    def reserved(self, num_prompt_tokens: int) -> bytes:
        """Make the billing context after the reservation, and return it encoded for the engines.

        An engine keeps it to bill the request if this process is killed. It is empty where only complete answers are
        billed.
        """
        self.bill = self.make_bill(self, num_prompt_tokens)
        return encode_bill(self.bill) if self.bills_failures else b""

    def estimated(self, num_prompt_tokens: int) -> int:
        """Note the upper estimate of the prompt's tokens, which is reserved, and return it."""
        self.estimated_prompt_tokens = num_prompt_tokens
        return num_prompt_tokens

    def submitted(self, client: EngineClient, sequence_id: str) -> None:
        """Record a submitted sequence. From here on the request is billed even if this process is killed."""
        assert self.bill is not None, "reserved before anything is submitted"
        self.sequences.append((client, sequence_id))
        if not self.reached_engine:
            self.reached_engine, self.prompt_tokens = True, self.bill.row.prompt_tokens
            self.on_submitted(self.bill.row)

    @property
    def ended_unix_s(self) -> int:
        """Time of the last token, in whole Unix seconds."""
        after_s = 0.0 if self.last_token_s is None else self.last_token_s - self.started_s
        return int(self.arrival_unix_ns / 1e9 + after_s)

    @property
    def used(self) -> UsedTokens:
        """Tokens to bill so far."""
        return UsedTokens(self.service_class, self.prompt_tokens, self.cached_tokens, self.output_tokens)

    @property
    def served_tier(self) -> str:
        """Service tier that an answer reports."""
        assert self.catalogue is not None and self.served is not None, "an answer has a class"
        return self.catalogue.tier_of(self.served)

    def response_headers(self) -> dict[str, str]:
        """Return the response headers of an admitted request: class, admission, quotas, ignored and adjusted fields."""
        headers = {CLASS_HEADER: self.service_class, ADMISSION_HEADER: self.admission_reason}
        headers |= self.reservation.headers()
        if self.estimated_prompt_tokens is not None:
            headers[ESTIMATE_HEADER] = str(self.estimated_prompt_tokens)
        if self.route is not None:
            headers |= route_headers(self.route, self.served_model)
        if self.spot_price is not None:
            headers[SPOT_HEADER] = self.spot_price.header(self.reservation.prices.get(self.service_class))
        if self.ignored_fields or self.adjusted_fields:
            headers |= field_headers(self.ignored_fields, self.adjusted_fields)
        return headers

    @property
    def spot_percent(self) -> int | None:
        """Percentage of the class's price that the request pays, in a spot class; None in another class."""
        if self.spot_price is not None:
            return self.spot_price.percent
        return None if self.quote is None else self.quote.terms.spot_percent

    def chose(self, catalogue: Catalogue, service: ServiceClass) -> None:
        self.catalogue, self.chosen, self.served, self.service_class = catalogue, service, service, service.name

    def admitted(self, served: ServiceClass, reason: Reason) -> None:
        """Record an engine's admission of one sequence.

        If one of several sequences is downgraded, the request counts as downgraded.
        """
        is_downgraded = served != self.chosen
        if self.admission_outcome and not is_downgraded:
            return
        self.served, self.service_class = served, served.name
        self.admission_outcome = "downgraded" if is_downgraded else "admitted"
        self.admission_reason = str(reason)

    def failed_over(self, failover: Failover, num_recomputed_tokens: int) -> None:
        """Record that a sequence continues at another engine.

        The tokens that it computes again are metered, not billed.
        """
        self.failovers.append(failover)
        self.num_recomputed_tokens += num_recomputed_tokens

    def abandon_attempt(self, model: str, *, failure: PlatformError, unix_ns: int) -> None:
        """Forget what the request came to at a model of its route, which failed before its first token.

        The client gets nothing of it, so nothing of it is billed. Its sequences have ended at their engines.
        """
        self.route_fallbacks.append(RouteFallback(model, failure.code, unix_ns))
        self.forget_attempt()

    def forget_attempt(self) -> None:
        """Forget what the request came to at engines, before it is submitted again. Its sequences have ended there."""
        self.bill = self.chosen = self.served = None
        self.admission_outcome = self.admission_reason = ""
        self.estimated_prompt_tokens = None
        self.reached_engine = self.was_begun = self.was_cut_by_limit = False
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.num_speculative_tokens = 0
        self.queue_ms = self.first_token_s = self.last_token_s = None
        self.progress, self.finish_reasons = [], []

    def completed(self) -> None:
        """Record that all choices have ended."""
        self.outcome = ENDED
        for cut in CUTS:
            if cut in self.finish_reasons:
                self.outcome = cut
        self.http_status = 200
        if self.was_cut_by_limit:
            self.error_code = self.reservation.refusal_code

    def kept_alive(self) -> None:
        """Record that a keep-alive event is sent. It begins the response, but is not part of the answer."""
        self.was_kept_alive = True

    def disconnected(self) -> None:
        self.outcome, self.http_status, self.error_code = "disconnected", CLIENT_CLOSED_REQUEST, "client_disconnected"

    def failed(self, error: PlatformError) -> None:
        is_overload = isinstance(error, Overloaded) and self.answered_status is None
        is_refusal = is_overload or (not self.sequences and error.status != 500)
        self.outcome = "rejected" if is_refusal else "failed"
        self.http_status = self.answered_status or (200 if self.was_kept_alive else self.status_of(error))
        self.error_code = error.code
        self.is_clients_fault = error.status in range(400, 500) and not isinstance(error, Overloaded)
        if isinstance(error, Overloaded):
            self.admission_outcome, self.admission_reason = "rejected", error.reason.value
        has_no_answer = isinstance(error, WAIVED) and (self.answered_status is None or not self.output_tokens)
        # nothing is sent, not even the output of other sequences
        if is_refusal or has_no_answer or not self.was_begun or not self.bills_failures:
            self.prompt_tokens = self.cached_tokens = self.output_tokens = 0

    def slo_attained(self, now_s: float) -> bool | None:
        """Return whether the SLO of the served class was attained, or None where it does not apply.

        It does not apply to a bad request, to a request beyond a quota or its tenant's own queue limit here, and to a
        client that disconnected while the SLO could still be attained.
        """
        service = self.served
        is_own = not self.reached_engine and self.admission_reason == Reason.TENANT_QUEUE_FULL.value
        is_theirs = self.http_status in range(400, 500) and (self.admission_outcome != "rejected" or is_own)
        if service is None or (self.outcome in ("failed", "rejected") and is_theirs):
            return None
        if self.outcome in COMPLETED:
            return slo_attained(service, self.progress)
        if self.outcome == "disconnected" and not slo_missed(service, self.progress, now_s - self.started_s):
            return None
        return False

    def guarantee_outcome(self, quote: AcceptedQuote, cost_nanodollars: int, now_s: float) -> GuaranteeOutcome:
        """Return what the quote of the request came to, for this cost in nano-dollars; `now_s` is monotonic."""
        elapsed_s = now_s - self.started_s
        engine_s = self._finished_at_engines_s()
        times = [
            SequenceTimes(
                one.num_tokens,
                elapsed_s if one.first_s is None else one.first_s,
                min(elapsed_s if one.last_s is None else one.last_s, engine_s.get(number, elapsed_s)),
            )
            for number, one in enumerate(self.progress)
        ]
        return quote.outcome_of(
            times,
            cost_nanodollars,
            int(self.arrival_unix_ns / 1e6 + elapsed_s * 1000),
            has_completed=self.outcome in COMPLETED,
            has_failed=self.outcome == "failed" and not self.is_clients_fault,
            was_paused=self.was_paused,
            was_cached=self.cached_tokens * CACHED_PART > self.prompt_tokens,
        )

    def _finished_at_engines_s(self) -> dict[int, float]:
        """Return the seconds from arrival to the end of each sequence at its last engine, by the engine's clock.

        A client that reads slowly delays the relayed end, but not this one.
        """
        found = {}
        for attempt in self.attempts:
            finished = attempt.stream.finished
            if finished is not None and finished.phases.finished_unix_ns and finished.phases.received_unix_ns:
                at_engine_ns = finished.phases.finished_unix_ns - finished.phases.received_unix_ns
                found[attempt.sequence] = (attempt.submitted_ns - self.arrival_unix_ns + at_engine_ns) / 1e9
        return found
