"""An engine's figures, and what they mean for whoever shows them as metrics: the gateway of all its engines, and each
engine of itself. The tables have fields of `Figures` and of `ClassLoad`; counters are the fields that end in `_total`,
named without it, and so is a gauge, since Prometheus keeps that ending for counters."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class SleepState(StrEnum):
    """Whether an engine can take requests, as far as its sleep goes."""

    AWAKE = "awake"
    FALLING_ASLEEP = "falling_asleep"  # takes no more; ends what is open, then frees the device's memory
    ASLEEP = "asleep"
    WAKING = "waking"


class ClassLoad(msgspec.Struct, frozen=True, array_like=True):
    """One class's state and counters in an engine."""

    name: str
    num_waiting: int
    num_running: int
    predicted_ttft_s: float  # of an empty prompt that arrives now
    admitted_total: int
    rejected_total: dict[str, int]  # by reason
    downgraded_total: int
    preempted_total: dict[str, int]  # by reason
    demoted_total: int
    boosted_total: int
    recomputed_tokens_total: int
    oldest_waiting_unix_s: float = 0.0  # when the one came that has waited longest; 0: none waits, or it is not known


class StepCosts(msgspec.Struct, frozen=True):
    """How long an engine's steps take, as it has learned: seconds of each step, and more for what is in it."""

    step_s: float
    row_s: float
    bends: tuple[tuple[int, float], ...]  # beyond so many rows, so much more each
    context_token_s: float  # whose KV decoding rows read
    pair_s: float  # of a prompt token and a token that it attends to
    relative_error: float  # of its predictions
    prefill_step_s: float = 0.0  # more, of a step that has prompt tokens


class Figures(msgspec.Struct, frozen=True):
    """What an engine's core knows of itself: its state after a step, and its counters since start (monotonic)."""

    num_running: int
    num_waiting: int
    num_paused: int  # without credit; they hold no place in the batch
    kv_blocks_total: int
    kv_blocks_used: int  # held by requests
    kv_blocks_cached: int  # free, but holding a prefix that may be hit
    block_size: int
    steps_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    output_tokens_total: int
    requests_total: int
    host_blocks_total: int = 0  # the host-memory tier
    host_blocks_used: int = 0
    swapped_out_blocks_total: int = 0
    swapped_in_blocks_total: int = 0
    attention_waited_seconds_total: float = 0.0  # for experts on ranks of their own
    experts_waited_seconds_total: float = 0.0  # these, on average, for attention
    classes: list[ClassLoad] = []
    tokens_past_stop_total: int = 0  # computed for requests that had ended by then; nobody pays for them
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    max_batch_tokens: int = 0  # of a step; 0 where that is not known
    max_running: int = 0
    step_costs: StepCosts | None = None  # None until it has learned them
    prefill_done_requests_total: int = 0  # requests that other engines went on with
    disaggregated_decode_requests_total: int = 0  # that came with their KV …
    lost_transfers_total: int = 0  # … or without it, although it was to come, and were computed again
    speculative_tokens_total: int = 0  # computed before they were asked for
    speculative_used_tokens_total: int = 0  # of them, those that requests began with
    speculative_wasted_tokens_total: int = 0  # and those that none did in time
    kv_blocks_kept: int = 0  # for conversations that come back
    host_hit_blocks_total: int = 0  # of prefixes, found on the host
    disk_bytes_total: int = 0  # that the prefix cache may take on disk; no counter
    disk_bytes_used: int = 0
    disk_blocks_cached: int = 0
    disk_written_blocks_total: int = 0
    disk_written_bytes_total: int = 0
    disk_dropped_blocks_total: int = 0
    disk_failed_writes_total: int = 0
    disk_restored_blocks_total: int = 0
    disk_restored_bytes_total: int = 0
    disk_waited_requests_total: int = 0
    disk_passed_over_requests_total: int = 0
    disk_lost_files_total: int = 0
    expert_slots: int = 0  # on the device, for offloaded experts
    expert_hits_total: int = 0  # of those, that were there when a pass over their layer came …
    expert_misses_total: int = 0  # … and that were not
    prefetched_experts_total: int = 0
    prefetched_expert_hits_total: int = 0  # of them, those that the next pass asked for
    expert_loaded_bytes_total: int = 0
    rebalances_total: int = 0  # of experts over ranks
    moved_expert_bytes_total: int = 0  # from rank to rank
    rank_balancedness: float = 1.0  # of what experts had to do when that was last judged, and …
    rank_balancedness_planned: float = 1.0  # … by where they were moved then
    masked_ranks: int = 0  # that did not come, and whose parts of the model the others have
    prefill_seconds_total: float = 0.0  # of steps that had prompt tokens in them, decodes beside or not
    decode_seconds_total: float = 0.0  # of all others
    grammars_waiting: int = 0
    grammar_compile_seconds_total: float = 0.0
    grammar_worker_restarts_total: int = 0
    tenant_kv_blocks: dict[str, int] = {}  # that a tenant's requests hold, each counting its own; of those with most


class Load(Figures, frozen=True, kw_only=True, tag="load"):
    """The engine's state and its counters since start, as its front tells every gateway with each heartbeat."""

    engine_id: str
    seq: int
    draining: bool = False
    running_for_s: float = 0.0  # the engine, which knows of all since then
    sleep: SleepState = SleepState.AWAKE
    sleep_problem: str = ""  # why it did not fall asleep, or wake, when it was last told to
    unacknowledged_replicas: list[str] = []  # gateway processes with requests that are open, or ended and not settled


GAUGES = (
    ("num_running", "Requests in the batch."),
    ("num_waiting", "Requests that wait for a place in the batch."),
    ("num_paused", "Requests without credit, which hold no place in the batch."),
    ("kv_blocks_total", "Blocks of the KV cache."),
    ("kv_blocks_used", "Blocks of the KV cache that requests hold."),
    ("kv_blocks_cached", "Free blocks that hold a prefix which may be hit."),
    ("kv_blocks_kept", "Blocks that are evicted after others, for conversations that come back; on all tiers."),
    ("host_blocks_total", "Blocks of the host-memory tier."),
    ("host_blocks_used", "Blocks of the host-memory tier in use."),
    ("disk_bytes_total", "Bytes that the prefix cache may take on disk; 0 without that tier."),
    ("disk_bytes_used", "Bytes that it takes."),
    ("disk_blocks_cached", "Blocks that are on disk."),
    ("grammars_waiting", "Grammars of structured outputs that wait to be compiled, or are being compiled."),
    ("expert_slots", "Slots on the device for offloaded experts, of all layers."),
    ("rank_balancedness", "Mean load of ranks by experts, over the largest, when last judged; 1 where nothing is."),
    ("rank_balancedness_planned", "The same load, by where experts were moved then."),
    ("masked_ranks", "Ranks that it does without since it started; others have their parts of the model."),
)
COUNTERS = (
    ("steps", "Steps of the engine."),
    ("prompt_tokens", "Prompt tokens of its requests."),
    ("cached_tokens", "Of these, tokens that the prefix cache had."),
    ("output_tokens", "Output tokens that it made."),
    ("requests", "Requests that it was given."),
    ("swapped_out_blocks", "Blocks moved to the host-memory tier."),
    ("swapped_in_blocks", "Blocks moved back from it."),
    ("attention_waited_seconds", "Seconds that its first rank waited for experts on ranks of their own."),
    ("experts_waited_seconds", "Seconds that those ranks waited for attention, on average."),
    ("host_hit_blocks", "Blocks of prefixes that were found in the host-memory tier."),
    ("disk_restored_blocks", "Blocks of prefixes that were found on disk and brought back."),
    ("disk_restored_bytes", "Bytes of these."),
    ("disk_written_blocks", "Blocks written to disk."),
    ("disk_written_bytes", "Bytes written to disk."),
    ("disk_dropped_blocks", "Blocks that were not written: the disk was too slow, full, or failing."),
    ("disk_failed_writes", "Writes that failed; each turns writing off for a minute."),
    ("disk_waited_requests", "Requests that waited for blocks from the disk."),
    ("disk_passed_over_requests", "Requests that did not, because computing was predicted to take less."),
    ("disk_lost_files", "Files that were gone or were not what had been written when they were wanted."),
    ("tokens_past_stop", "Tokens computed for requests that had ended by then; nobody pays for them."),
    ("drafted_tokens", "Tokens guessed and computed, of speculative decoding; nobody pays for a guess."),
    ("accepted_tokens", "Of these, tokens that came true."),
    ("handed_over_requests", "Requests whose prompts it computed, and which other engines went on with."),
    ("disaggregated_decode_requests", "Requests that came with their prompt's KV from another engine."),
    ("lost_transfers", "Requests that came without it, although it was to come; it computed their prompts again."),
    ("speculative_tokens", "Prompt tokens computed before anybody asked for them, while nothing else was to be done."),
    ("speculative_used_tokens", "Of these, tokens that a request began with."),
    ("speculative_wasted_tokens", "Of these, tokens that no request began with in time."),
    ("expert_hits", "Offloaded experts that were on the device, or on their way, when a pass over their layer came."),
    ("expert_misses", "Offloaded experts that were not."),
    ("prefetched_experts", "Offloaded experts fetched before a pass asked for them."),
    ("prefetched_expert_hits", "Of these, experts that the next pass over their layer asked for."),
    ("expert_loaded_bytes", "Bytes of offloaded experts that were brought to the device."),
    ("rebalances", "Times that experts were moved between its ranks."),
    ("moved_expert_bytes", "Weights of experts that ranks sent each other."),
    ("grammar_compile_seconds", "Processor time of compiling grammars, refused ones too."),
    ("grammar_worker_restarts", "Restarts of the processes that compile and step grammars."),
    ("prefill_seconds", "Seconds of steps that had prompt tokens in them."),
    ("decode_seconds", "Seconds of steps that had none."),
)
CLASS_GAUGES = (  # the field, what it is called as a metric, and what it means
    ("num_waiting", "num_waiting", "Requests of the class that wait."),
    ("num_running", "num_running", "Requests of the class in the batch."),
    ("predicted_ttft_s", "predicted_ttft_seconds", "Predicted time to first token of an empty prompt."),
    (
        "oldest_waiting_unix_s",
        "oldest_waiting_timestamp_seconds",
        "When the request came that has waited longest, in Unix time; 0 while none waits.",
    ),
)
CLASS_COUNTERS = (
    ("admitted", "Requests admitted to the class."),
    ("downgraded", "Requests of the class that were served in its fallback."),
    ("demoted", "Requests that could not keep their promise any more and were put behind those that can."),
    ("boosted", "Requests that had waited too long and were put before others."),
    ("recomputed_tokens", "Tokens computed again after preemptions."),
)
CLASS_COUNTERS_BY_REASON = (
    ("rejected", "Requests of the class that were rejected."),
    ("preempted", "Preemptions of the class's requests."),
)
