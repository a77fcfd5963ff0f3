"""What a policy is asked, and the base that answers as plainly as possible.

A policy owns the order of those who want prefill, and nothing else: the scheduler tells it who came, who was served and
who left, and asks it whom to take next, how long a step may be and who gives way. It holds indexes over sequences and
counters over tenants, sees neither blocks nor tensors, and never reads how long an answer will really be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from moiety_engine.scheduling.class_counters import ClassCounters
from moiety_engine.scheduling.entry_heap import EntryHeap
from moiety_engine.scheduling.output_predictor import OutputPredictor
from moiety_engine.scheduling.plan import Chunk
from moiety_engine.scheduling.step_time_model import StepShape, StepTimeModel
from moiety_engine.sequence import Sequence
from moiety_wire.classes import ServiceClass
from moiety_wire.notes import Reason


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """Whether a request is let in: the class it will be served in, or None and when to come back."""

    service: ServiceClass | None
    reason: Reason
    predicted_ttft_s: float | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepBudget:
    """How long a step may take, as far as prefill can be blamed, and how many prompt tokens go in it all the same."""

    seconds: float
    floor_tokens: int
    best_rank: int = 0
    of_worse_ranks: StepBudget | None = None  # for prompts of ranks worse than `best_rank`; None: the same

    def for_rank(self, rank: int) -> StepBudget:
        """Return the budget for prompts of that rank."""
        return self if self.of_worse_ranks is None or rank <= self.best_rank else self.of_worse_ranks


class BatchView:
    """What the batch looks like while a step is being filled. The scheduler keeps it up to date."""

    __slots__ = (
        "blocks_free",
        "blocks_of_tenant",
        "blocks_total",
        "peers",
        "predicted_output",
        "running",
        "shape",
        "slack_s",
        "somebody_lacks_blocks",
        "worst_rank",
    )

    def __init__(
        self,
        shape: StepShape,
        slack_s: float,
        running: list[Sequence],
        worst_rank: int,
        blocks_free: int,
        blocks_total: int,
        predicted_output: Callable[[], float],
    ) -> None:
        self.shape = shape
        self.slack_s = slack_s  # until the first token is due that a running request still owes in time
        self.running = running
        self.peers = running  # of them, those that have their blocks where the sequence in question would
        self.worst_rank = worst_rank  # of those running; -1 if none runs
        self.blocks_free = blocks_free  # these two are of that one place
        self.blocks_total = blocks_total
        self.predicted_output = predicted_output  # tokens that all running answers are predicted to have
        self.somebody_lacks_blocks = False  # of those whose turn it was in this step
        self.blocks_of_tenant: dict[str, int] | None = None  # counted when somebody asks

    def look_at(self, peers: list[Sequence], blocks_free: int) -> None:
        """It is asked for a sequence that would have its blocks where these have theirs."""
        if peers is not self.peers:
            self.peers, self.blocks_of_tenant = peers, None
        self.blocks_free = blocks_free

    def tenant_blocks(self, tenant: str) -> int:
        """Blocks that running sequences of the tenant hold there (shared ones counted for each)."""
        if self.blocks_of_tenant is None:
            self.blocks_of_tenant = {}
            for s in self.peers:
                self.blocks_of_tenant[s.tenant] = self.blocks_of_tenant.get(s.tenant, 0) + len(s.blocks)
        return self.blocks_of_tenant.get(tenant, 0)


@dataclass(slots=True)
class PolicyContext:
    """What policies predict with, shared with the scheduler that teaches it, and the bounds that they live in."""

    step_time: StepTimeModel
    lengths: OutputPredictor
    tally: ClassCounters
    max_batch_tokens: int
    max_running: int
    max_waiting: int
    num_blocks: int  # of each group of ranks
    block_size: int
    cached_tokens: Callable[[Sequence], int]  # how many of its tokens the prefix cache holds now


class Policy:
    """The base: a queue in the order of `key`, no limit on a step's time, the youngest gives way, all are let in."""

    name = ""
    sizes_chunks = False  # whether the policy says how long a step may last

    def __init__(self, context: PolicyContext) -> None:
        self.context = context
        self._heap = EntryHeap()
        self._num_queued = 0

    # ── who wants prefill ──

    def key(self, sequence: Sequence, now_s: float) -> Any:
        """What orders the queue; smaller first, ties by arrival. Computed once, on entering."""
        raise NotImplementedError

    def push(self, sequence: Sequence, now_s: float) -> None:
        """The sequence wants prefill: it is new, returns, or its last chunk did not complete its prompt."""
        self._num_queued += sequence.enter_queue()
        self._heap.push(self.key(sequence, now_s), sequence)

    def pop(self, now_s: float) -> Sequence | None:
        """Take the first out of the queue; it comes back by `push` unless its prefill will be complete."""
        sequence = self._heap.pop()
        if sequence is not None:
            self._num_queued -= sequence.leave_queue()
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """If the sequence is queued, it is no longer."""
        self._num_queued -= sequence.leave_queue()

    @property
    def num_queued(self) -> int:
        return self._num_queued

    # ── what happened ──

    def arrived(self, sequence: Sequence, now_s: float) -> None:
        """A request was let in."""

    def started(self, sequence: Sequence, num_uncached: int, now_s: float) -> None:
        """The sequence joined the batch for the first time, with so many tokens to prefill."""

    def decoded(self, sequences: list[Sequence]) -> None:
        """Each of these got an output token."""

    def stepped(self, seconds: float, shape: StepShape, now_s: float) -> None:
        """A step of this shape took so long."""

    def preempted(self, sequence: Sequence, beneficiary: Sequence | None, cost_s: float) -> None:
        """The sequence gave way, and what it had will take about so long to get back."""

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """The sequence is over; it may never have started."""

    # ── what to do ──

    def admit(self, sequence: Sequence, now_s: float) -> AdmissionDecision:
        """Whether to let a new request in."""
        return AdmissionDecision(sequence.service, Reason.IN_TIME)

    def overflow(self, sequence: Sequence) -> AdmissionDecision:
        """What a request is told for which the queue has no place."""
        return AdmissionDecision(None, Reason.QUEUE_FULL, retry_after_s=1.0)

    def predicted_ttft_s(self) -> dict[str, float]:
        """By class, the time to first token of an empty prompt that arrives now."""
        return {}

    def decodes_of_step(self, decoding: list[Chunk], now_s: float) -> list[Chunk]:
        """Return those of the decoding requests' chunks that are part of the next step, in the same order."""
        return decoding

    def step_budget(self, view: BatchView, now_s: float) -> StepBudget | None:
        """How long the next step may take; None for no limit but that of tokens."""
        return None

    def delays(self, sequence: Sequence, view: BatchView, num_blocks: int, now_s: float) -> Reason | None:
        """Why the sequence, which would take so many blocks, may not join the batch in this step; None if it may."""
        return None

    def may_overtake(self, blocked: Sequence, view: BatchView, now_s: float) -> bool:
        """Whether others may be taken while this one, which came first, finds no blocks."""
        return False

    def looks_past_full_batch(self, blocked: Sequence, running: Iterable[Sequence]) -> bool:
        """Return whether another tenant's request may still get a place in a full batch after `blocked` found none."""
        return False

    def waiting_for_others(self, growing: list[Sequence]) -> list[Sequence]:
        """Of decoding sequences that need one more block now, those that must wait until others have ended."""
        return []

    def victims(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, now_s: float, *, takes_blocks: bool = True
    ) -> list[Sequence]:
        """Who may give way, the first to go first: for an urgent beneficiary, or (None) so that others can decode.
        `takes_blocks` is false where it is but a place in the batch that is wanted."""
        return [] if beneficiary is not None else sorted(running, key=lambda s: -s.order)
