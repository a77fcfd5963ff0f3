"""Records of requests and tenants during a simulation. The driver owns and changes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from moiety_wire.classes import ServiceClass
from moiety_wire.trace_events import Reason
from moiety_workload.request import TraceRequest


class Tenant:
    """A tenant's open requests, and the longest time in which it had open requests and none ran."""

    __slots__ = ("longest_gap_ns", "name", "num_open", "quiet_since_ns", "served_step", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.num_open = 0
        self.quiet_since_ns = 0  # end of its last service, or the arrival that ended its idle time
        self.served_step = -1
        self.longest_gap_ns = 0

    def record_arrival(self, now_ns: int) -> None:
        if self.num_open == 0:
            self.quiet_since_ns = now_ns
        self.num_open += 1

    def waited_until(self, now_ns: int) -> None:
        self.longest_gap_ns = max(self.longest_gap_ns, now_ns - self.quiet_since_ns)


class ServiceAccount:
    """Service of one tenant within one class, in VTC's units.

    Counts prompt tokens computed for the first time, and twice the output tokens. The account is backlogged while one
    of its requests waits that has never run.
    """

    __slots__ = ("num_waiting", "service", "service_class", "tenant", "was_backlogged")

    def __init__(self, tenant: Tenant, service_class: str) -> None:
        self.tenant = tenant
        self.service_class = service_class
        self.service = 0
        self.num_waiting = 0
        self.was_backlogged = False  # at every moment since the last sample

    def record_arrival(self) -> None:
        self.num_waiting += 1

    def left_queue(self) -> None:
        self.num_waiting -= 1
        if self.num_waiting == 0:
            self.was_backlogged = False


class Record:
    """Lifecycle of one request. Times are virtual nanoseconds; 0 where the state was not reached."""

    __slots__ = (
        "account",
        "arrival_ns",
        "cached_tokens",
        "computed_prompt_tokens",
        "end_ns",
        "failure",
        "first_ns",
        "forbidden_preemptions",
        "key",
        "last_ns",
        "latest_ns",
        "num_output",
        "num_preemptions",
        "num_wanted",
        "peak_computed",
        "prefill_tokens",
        "recomputed_tokens",
        "request",
        "retry_after_s",
        "scheduled_ns",
        "served_class",
        "service_class",
        "tpot_ns",
        "window_output",
        "window_prompt",
    )

    def __init__(
        self, key: int, request: TraceRequest, service_class: ServiceClass, account: ServiceAccount, arrival_ns: int
    ):
        self.key = key
        self.request = request
        self.service_class = service_class
        self.account = account
        self.arrival_ns = arrival_ns
        self.tpot_ns = round((service_class.tpot_s or 0.0) * 1e9)
        self.num_wanted = request.output_tokens  # the true length, which only the driver knows
        self.num_output = 0
        self.scheduled_ns = 0
        self.first_ns = 0
        self.last_ns = 0
        self.end_ns = 0
        self.latest_ns = 0  # largest (time of token n) − (n − 1) · TPOT; compared with the TTFT deadline
        self.cached_tokens = 0
        self.peak_computed = 0
        self.computed_prompt_tokens = 0  # computed for the first time
        self.prefill_tokens = 0  # all tokens computed in chunks
        self.recomputed_tokens = 0
        self.num_preemptions = 0
        self.forbidden_preemptions = 0
        self.served_class = ""
        self.failure: Reason | str | None = None
        self.retry_after_s: float | None = None
        self.window_prompt = 0
        self.window_output = -1  # −1: the request ended before the observed window did

    @property
    def completed(self) -> bool:
        return self.end_ns > 0 and self.failure is None

    @property
    def attained(self) -> bool:
        """Return whether the request attained its SLO.

        Every token n must come by arrival + TTFT target + (n − 1) · TPOT target, and the last by the completion target.
        The allowance per prompt token counts uncached tokens only. A rejected request has not attained its SLO.
        """
        if not self.completed:
            return False
        service_class = self.service_class
        if service_class.completion_s is not None and self.last_ns - self.arrival_ns > service_class.completion_s * 1e9:
            return False
        if service_class.ttft_s is None:
            return True
        uncached = self.request.input_tokens - self.cached_tokens
        ttft_s = service_class.ttft_s + service_class.ttft_per_1k_s * uncached / 1000
        compared_ns = self.latest_ns if service_class.tpot_s is not None else self.first_ns
        return compared_ns <= self.arrival_ns + ttft_s * 1e9

    def close_window(self) -> None:
        """Record the progress of the request at the end of the observed window."""
        self.window_prompt, self.window_output = self.progress

    @property
    def progress(self) -> tuple[int, int]:
        """Number of (prompt tokens, output tokens) done."""
        return (self.request.input_tokens if self.num_output else self.peak_computed), self.num_output

    @property
    def window_progress(self) -> tuple[int, int]:
        """Number of (prompt tokens, output tokens) done when the observed window ended."""
        return self.progress if self.window_output < 0 else (self.window_prompt, self.window_output)


@dataclass(slots=True)
class Samples:
    """Every account's service at regular times, and whether it was backlogged throughout the interval before."""

    interval_s: float
    service: list[list[int]] = field(default_factory=list)  # [sample][account]
    backlogged: list[list[bool]] = field(default_factory=list)

    def take(self, accounts: list[ServiceAccount]) -> None:
        """Take a sample. Accounts are only appended, so that a shorter row lacks the later ones."""
        self.service.append([account.service for account in accounts])
        self.backlogged.append([account.was_backlogged for account in accounts])
        for account in accounts:
            account.was_backlogged = account.num_waiting > 0


@dataclass(slots=True)
class Run:
    """Record of a simulation. `window_s` is the time of arrivals; the drain follows it."""

    records: list[Record]
    tenants: list[Tenant]
    accounts: list[ServiceAccount]
    samples: Samples
    window_s: float
    end_ns: int
    end_s: float  # since the start
    num_steps: int
    busy_s: float
    computed_tokens: int  # rows of all steps
    copied_blocks: int
    kv_used_fraction: float  # share of the pool; time-weighted mean over the window's steps
