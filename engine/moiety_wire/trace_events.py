"""Notes of an engine on a request and its steps, for the request's trace."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Reason(StrEnum):
    """Reason of a scheduler decision; traces, metrics and responses carry these codes."""

    # admitted, started
    IN_TIME = "in_time"  # the SLO is predicted to be met
    ACCEPTED_LATE = "accepted_late"  # it is predicted to be missed, but the class queues
    FAILED_OVER = "failed_over"  # another engine had admitted the request and was lost
    PREFILL_DONE = "prefill_done"  # another engine had admitted the request and computed its prompt
    # downgraded, rejected
    PREDICTED_LATE = "predicted_late"  # the SLO is predicted to be missed
    KV_PEAK = "kv_peak"  # the predicted peak of KV memory does not fit
    TENANT_QUEUE_FULL = "tenant_queue_full"
    QUEUE_FULL = "queue_full"
    SHED = "shed"  # dropped from the queue in favour of more critical work
    # delayed
    BATCH_FULL = "batch_full"
    NO_BLOCKS = "no_blocks"
    SHARE_FULL = "share_full"  # the tenant holds its share of KV memory while others wait
    SHARED_PREFIX = "shared_prefix"  # another request computes its prefix in the same step
    # preempted
    DECODE_NEEDS_BLOCKS = "decode_needs_blocks"
    URGENT_NEEDS_BLOCKS = "urgent_needs_blocks"
    OVER_SHARE = "over_share"  # its tenant held more than its share of blocks, which another tenant needed
    # demoted, boosted, resumed
    SLO_UNATTAINABLE = "slo_unattainable"
    WAITED_TOO_LONG = "waited_too_long"
    RECOMPUTE = "recompute"  # resumed by recomputing its KV
    SWAP = "swap"  # resumed by copying its KV back from host memory
    # migrated
    TRANSFERRED = "transferred"  # its KV came from the prefill engine
    KV_LOST = "kv_lost"  # its KV was lost and is recomputed


class EventKind(StrEnum):
    """Scheduler decision on a request."""

    ADMITTED = "admitted"
    DOWNGRADED = "downgraded"
    DELAYED = "delayed"  # had to wait; the reason is the last one
    STARTED = "started"
    BOOSTED = "boosted"  # waited longer than its class allows, and is now served before others
    DEMOTED = "demoted"  # cannot meet its SLO any more, and is served after those that can
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    MIGRATED = "migrated"  # came from the engine that computed its prompt


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One decision about one request.

    `other` is the id of the request that profited from it ("" if none). It is for the operator's traces only, and must
    not appear in a response.
    """

    unix_ns: int
    kind: EventKind
    reason: Reason
    other: str = ""


class Phases(msgspec.Struct, frozen=True):
    """Timestamps of a request's phases in unix nanoseconds; 0 if a phase was not reached.

    The phases are engine.queue (received → scheduled), engine.prefill (scheduled → first_token) and engine.decode (→
    finished).
    """

    received_unix_ns: int
    scheduled_unix_ns: int = 0
    first_token_unix_ns: int = 0
    finished_unix_ns: int = 0


class StepNote(msgspec.Struct, frozen=True, array_like=True):
    """Step of the engine, one of the few that it records in detail.

    `trace_id` is the id of a separate trace with one span, whose id is the last eight bytes. So all gateways with a
    request in the step use the same ids.
    """

    trace_id: bytes  # 16
    number: int  # since the engine's start
    begin_unix_ns: int
    end_unix_ns: int
    predicted_s: float | None  # duration predicted by the scheduler
    num_decodes: int  # sequences that decoded a token
    num_prefills: int  # sequences with prefilled prompt tokens
    num_prefill_tokens: int
    num_preempted: int  # sequences preempted for this step
    num_output_tokens: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    classes: dict[str, int] = {}  # sequences by class
    # from the latest expert counts, over about two seconds of steps; None without experts
    active_experts: float | None = None  # active experts of a layer per step
    balancedness: float | None = None  # mean tokens of an expert ÷ tokens of the busiest expert


class StepNotes(msgspec.Struct, frozen=True, array_like=True):
    """Recorded steps that a request ran in: all of them, or a sample spread over its time."""

    num_seen: int
    steps: list[StepNote]
