"""What an engine notes of a request and of the steps it was in, for its trace."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Reason(StrEnum):
    """Why the scheduler did what it did: the codes that traces, metrics and answers carry."""

    # admitted, started
    IN_TIME = "in_time"  # the promise is predicted to be kept
    ACCEPTED_LATE = "accepted_late"  # it is not, but the class waits
    FAILED_OVER = "failed_over"  # another engine had admitted it and was lost
    PREFILL_DONE = "prefill_done"  # another engine had admitted it and computed its prompt
    # downgraded, rejected
    PREDICTED_LATE = "predicted_late"  # the class's promise is predicted to be missed
    KV_PEAK = "kv_peak"  # the predicted peak of KV memory does not fit
    TENANT_QUEUE_FULL = "tenant_queue_full"
    QUEUE_FULL = "queue_full"
    SHED = "shed"  # dropped from the queue for more critical work
    # delayed
    BATCH_FULL = "batch_full"
    NO_BLOCKS = "no_blocks"
    SHARE_FULL = "share_full"  # the tenant holds its share of KV memory while others wait
    SHARED_PREFIX = "shared_prefix"  # another request is computing its prefix in this very step
    # preempted
    DECODE_NEEDS_BLOCKS = "decode_needs_blocks"
    URGENT_NEEDS_BLOCKS = "urgent_needs_blocks"
    OVER_SHARE = "over_share"  # its tenant held more than its share of blocks, and another wanted its own
    # demoted, boosted, resumed
    BEYOND_REPAIR = "beyond_repair"
    WAITED_TOO_LONG = "waited_too_long"
    RECOMPUTE = "recompute"  # resumed by computing its KV again
    SWAP = "swap"  # resumed by copying its KV back from host memory
    # migrated
    TRANSFERRED = "transferred"  # its KV came from the engine that had computed it
    KV_LOST = "kv_lost"  # it did not come, and is computed again


class EventKind(StrEnum):
    """What the scheduler did to a request."""

    ADMITTED = "admitted"
    DOWNGRADED = "downgraded"
    DELAYED = "delayed"  # had to wait; the reason is the last that held it back
    STARTED = "started"
    BOOSTED = "boosted"  # waited beyond its class's bound, and goes before others now
    DEMOTED = "demoted"  # cannot keep its promise any more, and goes after those that can
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    MIGRATED = "migrated"  # came from the engine that has computed its prompt


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One decision about one request. `other` is the id of the request that profited from it ("" if none): it is for
    the operator's traces, never for an answer."""

    unix_ns: int
    kind: EventKind
    reason: Reason
    other: str = ""


class Phases(msgspec.Struct, frozen=True):
    """When a request passed which point, unix nanoseconds; 0 where it did not get there. Between the points stand
    engine.queue (received → scheduled), engine.prefill (scheduled → first_token), engine.decode (→ finished)."""

    received_unix_ns: int
    scheduled_unix_ns: int = 0
    first_token_unix_ns: int = 0
    finished_unix_ns: int = 0


class StepNote(msgspec.Struct, frozen=True, array_like=True):
    """A step of the engine, one of the few that it looks at closely. `trace_id` is of a trace of its own, in which its
    only span has the last eight bytes as id, so that all gateways with a request in it call it the same."""

    trace_id: bytes  # 16
    number: int  # since the engine's start
    begin_unix_ns: int
    end_unix_ns: int
    predicted_s: float | None  # what the scheduler took it to last
    num_decodes: int  # sequences that got a token
    num_prefills: int  # sequences of which a part of the prompt was computed
    num_prefill_tokens: int
    num_preempted: int  # that gave way to it
    num_output_tokens: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    classes: dict[str, int] = {}  # sequences in it
    # of the experts' counts that were taken last, some two seconds of steps; None without experts
    active_experts: float | None = None  # of a layer, that had any tokens in a step
    balancedness: float | None = None  # mean tokens of an expert, as a share of those of the busiest


class StepNotes(msgspec.Struct, frozen=True, array_like=True):
    """The steps that a request ran in, of those that were looked at: all of them, or some, spread over its time."""

    num_seen: int
    steps: list[StepNote]
