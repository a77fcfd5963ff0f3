"""Interface of scheduling policies, and a base class with simple defaults.

A policy owns the order of the sequences that need prefill, and nothing else. The scheduler reports arrivals, service
and ends to it, and asks it for the next sequence, the length of a step and the victims of preemption. A policy holds
indexes over sequences and counters over tenants, sees neither blocks nor tensors, and never reads the actual length of
an output in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from moiety_engine.cache.table_layout import TableLayout
from moiety_engine.scheduling.fairness.served_tenants import ServedTenants
from moiety_engine.scheduling.fairness.tenant_counters import OUTPUT_WEIGHT
from moiety_engine.scheduling.outputs.output_predictor import OutputPredictor
from moiety_engine.scheduling.plan import Chunk
from moiety_engine.scheduling.queues.class_counters import ClassCounters
from moiety_engine.scheduling.queues.running_counts import RunningCounts
from moiety_engine.scheduling.step_time.step_time_model import StepShape, StepTimeModel
from moiety_engine.sequence import Sequence
from moiety_wire.classes import ServiceClass
from moiety_wire.trace_events import Reason


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """Result of admission: the class in which the request is served, or None and when to retry."""

    service: ServiceClass | None
    reason: Reason
    predicted_ttft_s: float | None = None
    retry_after_s: float | None = None


class StepBudget(msgspec.Struct, frozen=True):
    """Time limit of a step with prefill, and the number of prompt tokens that it takes regardless of the limit."""

    seconds: float
    floor_tokens: int
    best_rank: int = 0
    of_worse_ranks: StepBudget | None = None  # for prompts of ranks worse than `best_rank`; None: the same budget
    of_spot: StepBudget | None = None  # for prompts of spot classes; None: that of their rank

    def for_class(self, service: ServiceClass) -> StepBudget:
        """Return the budget for prompts of this class."""
        if service.spot and self.of_spot is not None:
            return self.of_spot
        return self if self.of_worse_ranks is None or service.rank <= self.best_rank else self.of_worse_ranks


class BatchView:
    """State of the batch while a step is being filled. The scheduler keeps it up to date."""

    __slots__ = (
        "blocks_free",
        "blocks_of_tenant",
        "blocks_total",
        "decodes",
        "lacks_blocks",
        "peers",
        "remaining_output",
        "running",
        "shape",
        "slack_s",
        "worst_rank",
    )

    def __init__(
        self,
        shape: StepShape,
        slack_s: float,
        decodes: list[Chunk],
        running: list[Sequence],
        worst_rank: int,
        blocks_free: int,
        blocks_total: int,
        remaining_output: Callable[[], float],
    ) -> None:
        self.shape = shape
        self.slack_s = slack_s  # time until the first deadline of a running request that is still on time
        self.decodes = decodes  # of the step, before its prefill
        self.running = running
        self.peers = running  # running sequences in the rank group of the sequence in question
        self.worst_rank = worst_rank  # of the running sequences; -1 if none runs
        self.blocks_free = blocks_free  # of that rank group, like the total
        self.blocks_total = blocks_total
        self.remaining_output = remaining_output  # at least what running requests still generate, predicted
        self.lacks_blocks = False  # true if a sequence of this step found too few blocks
        self.blocks_of_tenant: dict[str, int] | None = None  # counted on first use

    def select_group(self, peers: list[Sequence], blocks_free: int) -> None:
        """Switch the view to the rank group of a sequence: its running sequences and its number of free blocks."""
        if peers is not self.peers:
            self.peers, self.blocks_of_tenant = peers, None
        self.blocks_free = blocks_free

    def tenant_blocks(self, tenant: str) -> int:
        """Return the blocks that the tenant's running sequences hold in the group, without those of spot classes.

        Shared blocks count for each sequence.
        """
        if self.blocks_of_tenant is None:
            held = self.blocks_of_tenant = {}
            for s in self.peers:
                if not s.service.spot:
                    held[s.request.tenant] = held.get(s.request.tenant, 0) + s.kv.num_held
        return self.blocks_of_tenant.get(tenant, 0)


@dataclass(slots=True)
class PolicyContext:
    """Models and limits that policies use, shared with the scheduler, which trains the models."""

    step_time: StepTimeModel
    lengths: OutputPredictor
    tally: ClassCounters
    max_batch_tokens: int
    max_running: int
    max_waiting: int
    num_blocks: int  # of each rank group
    layout: TableLayout  # block tables of a sequence
    cached_tokens: Callable[[Sequence], int]  # returns how many of its tokens the prefix cache holds now
    running: RunningCounts
    batches_experts: bool = (
        False  # decodes whose order is open are chosen by the experts that they are predicted to use
    )

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of a rank group holds."""
        return self.num_blocks * self.layout.block_size // self.layout.slots_per_token


def vtc_bound(context: PolicyContext) -> float:
    """Return the bound of VTC's theorem 4.4 for a weight of 1: the largest difference of two backlogged tenants.

    A prompt is never longer than the KV cache, so that twice the service of a full cache covers both of its terms.
    """
    return 2 * OUTPUT_WEIGHT * context.kv_tokens


class Policy:
    """Interface of a policy. By default it limits no time, delays no request, and admits all requests."""

    sizes_chunks = False  # true if the policy limits the time of a step
    serves_spot = False  # true if requests of spot classes give way to those of all others
    counts_tenant_service = False  # true if it has counters of tenants, which replicas can exchange

    def __init__(self, context: PolicyContext) -> None:
        self.context = context
        self.served_tenants: ServedTenants | None = None  # None: the service of tenants is not exchanged

    # ── prefill queue ──

    def push(self, sequence: Sequence, now_s: float) -> None:
        """Queue a sequence that needs prefill: it is new, returns, or its last chunk did not complete its prompt."""
        raise NotImplementedError

    def pop(self, now_s: float) -> Sequence | None:
        """Remove and return the first sequence; it is pushed again unless the step completes its prefill."""
        raise NotImplementedError

    def discard(self, sequence: Sequence) -> None:
        """Remove the sequence from the queue if it is queued."""
        raise NotImplementedError

    @property
    def num_queued(self) -> int:
        """Number of queued sequences."""
        raise NotImplementedError

    # ── events ──

    def arrived(self, sequence: Sequence, now_s: float) -> None:
        """Record an admitted request."""

    def started(self, sequence: Sequence, num_uncached: int, now_s: float) -> None:
        """Record that the sequence joined the batch for the first time, with `num_uncached` tokens to prefill."""

    def decoded(self, sequences: list[Sequence]) -> None:
        """Record one output token for each of these sequences."""

    def stepped(self, seconds: float, shape: StepShape, now_s: float) -> None:
        """Record the duration of a step of this shape."""

    def preempted(self, sequence: Sequence, beneficiary: Sequence | None, cost_s: float) -> None:
        """Record a preemption. `cost_s` is the predicted time to restore the sequence's KV."""

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """Record the end of a sequence, which may never have started."""

    def add_remote_service(self, rank: int, tenant: str, service: float, slack: float) -> None:
        """Count service that a tenant received on other replicas, in the unit of the policy's counters.

        Only called if `counts_tenant_service`. A tenant that is far ahead of others already is charged only so far that
        it is ahead by the bound of the virtual token counter plus `slack`, in the same unit, plus this service.
        """
        raise NotImplementedError

    # ── decisions ──

    def admit(self, sequence: Sequence, now_s: float) -> AdmissionDecision:
        """Return the admission decision on a new request."""
        return AdmissionDecision(sequence.service, Reason.IN_TIME)

    def overflow(self, sequence: Sequence) -> AdmissionDecision:
        """Return the rejection of a request when the queue is full."""
        return AdmissionDecision(None, Reason.QUEUE_FULL, retry_after_s=1.0)

    def predicted_ttft_s(self) -> dict[str, float]:
        """Return the predicted time to first token, by class, of an empty prompt that arrives now."""
        return {}

    def decodes_of_step(self, decoding: list[Chunk], num_context: int, now_s: float) -> list[Chunk]:
        """Return the decode chunks that are part of the next step, in the same order; `decoding` itself if all are.

        `num_context` is the total number of tokens whose KV all of them read.
        """
        return decoding

    def gives_way(self, sequence: Sequence) -> bool:
        """Return whether the sequence gets nothing of this step, because requests of other classes wait."""
        return False

    def step_budget(self, view: BatchView, now_s: float) -> StepBudget | None:
        """Return the time budget of the next step; None if only the number of tokens is limited."""
        return None

    def delays(self, sequence: Sequence, view: BatchView, num_blocks: int, now_s: float) -> Reason | None:
        """Return why the sequence, which needs `num_blocks` blocks, may not join in this step; None if it may."""
        return None

    def may_overtake(self, blocked: Sequence, view: BatchView, now_s: float) -> bool:
        """Return whether later sequences may be taken while `blocked` lacks blocks."""
        return False

    def looks_past_full_batch(self, blocked: Sequence, running: Iterable[Sequence]) -> bool:
        """Return whether another tenant's request may still get a slot in a full batch after `blocked` found none."""
        return False

    def full_batch_is_final(self) -> bool:
        """Return whether `victims` is empty for each queued sequence that needs a slot in the full batch.

        False if that is not known. The rest of the search for prompts is then left until the step is launched.
        """
        return False

    def waiting_for_others(self, growing: list[Sequence]) -> list[Sequence]:
        """Return the decoding sequences, of those that need one more block, that must wait for others to end."""
        return []

    def victims(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, now_s: float, *, takes_blocks: bool = True
    ) -> list[Sequence]:
        """Return the sequences that may be preempted, the first victim first.

        The beneficiary is an urgent sequence, or None if blocks are needed for decoding. `takes_blocks` is false if
        only a slot in the batch is needed.
        """
        raise NotImplementedError
