"""Figures of an engine, and their descriptions as metrics.

The gateway exports them for all its engines, and each engine exports its own. The tables list fields of `Figures` and
`ClassLoad`. Counters are the fields that end in `_total`, listed without it. A gauge is exported without it as well,
since Prometheus reserves that suffix for counters.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class SleepState(StrEnum):
    """Sleep state of an engine, which decides whether it accepts requests."""

    AWAKE = "awake"
    FALLING_ASLEEP = "falling_asleep"  # accepts no requests; finishes the open ones, then frees device memory
    ASLEEP = "asleep"
    WAKING = "waking"


class ClassLoad(msgspec.Struct, frozen=True, array_like=True):
    """State and counters of one service class in an engine."""

    name: str
    num_waiting: int
    num_running: int
    predicted_ttft_s: float  # for an empty prompt that arrives now
    admitted_total: int
    rejected_total: dict[str, int]  # by reason
    downgraded_total: int
    preempted_total: dict[str, int]  # by reason
    demoted_total: int
    boosted_total: int
    recomputed_tokens_total: int
    oldest_waiting_unix_s: float = 0.0  # arrival of the request that has waited longest; 0: none waits, or unknown


class StepCosts(msgspec.Struct, frozen=True):
    """Step time model that an engine has learned: the seconds of each step, and the additional costs of its content."""

    step_s: float
    row_s: float
    bends: tuple[tuple[int, float], ...]  # additional seconds per row beyond a number of rows
    context_token_s: float  # per context token that decode rows read
    pair_s: float  # per pair of a prompt token and a token that it attends to
    relative_error: float  # relative error of the predictions
    prefill_step_s: float = 0.0  # additional seconds of a step with prompt tokens


class Figures(msgspec.Struct, frozen=True):
    """State of an engine's core after a step, and its monotonic counters since start."""

    num_running: int
    num_waiting: int
    num_paused: int  # without credit; not in the batch
    kv_blocks_total: int
    kv_blocks_used: int  # held by requests
    kv_blocks_cached: int  # free, with a cached prefix
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
    attention_waited_seconds_total: float = 0.0  # waiting for expert ranks
    experts_waited_seconds_total: float = 0.0  # mean over the expert ranks, waiting for attention
    classes: list[ClassLoad] = []
    tokens_past_stop_total: int = 0  # computed for requests that had already ended; not billed
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    max_batch_tokens: int = 0  # token budget of a step; 0 if unknown
    max_running: int = 0
    step_costs: StepCosts | None = None  # None until the model is learned
    prefill_done_requests_total: int = 0  # requests that other engines continued
    disaggregated_decode_requests_total: int = 0  # requests that came with their KV …
    lost_transfers_total: int = 0  # … or whose KV was lost and recomputed
    speculative_tokens_total: int = 0  # computed by speculative prefill
    speculative_used_tokens_total: int = 0  # speculative tokens that requests used
    speculative_wasted_tokens_total: int = 0  # speculative tokens that no request used in time
    kv_blocks_kept: int = 0  # retained for returning conversations
    host_hit_blocks_total: int = 0  # prefix blocks found in host memory
    disk_bytes_total: int = 0  # disk limit of the prefix cache; a gauge, not a counter
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
    expert_slots: int = 0  # device slots for offloaded experts
    expert_hits_total: int = 0  # offloaded experts that were on the device when their layer ran …
    expert_misses_total: int = 0  # … and that were not on the device
    prefetched_experts_total: int = 0
    prefetched_expert_hits_total: int = 0  # prefetched experts that the next pass used
    expert_loaded_bytes_total: int = 0
    rebalances_total: int = 0  # expert rebalances across ranks
    moved_expert_bytes_total: int = 0  # moved between ranks
    rank_balancedness: float = 1.0  # balancedness at the last evaluation of the load …
    rank_balancedness_planned: float = 1.0  # … and with the placement planned then
    masked_ranks: int = 0  # excluded ranks; the others have their parts of the model
    prefill_seconds_total: float = 0.0  # seconds of steps with prompt tokens, with or without decodes
    decode_seconds_total: float = 0.0  # seconds of all other steps
    grammars_waiting: int = 0
    grammar_compile_seconds_total: float = 0.0
    grammar_worker_restarts_total: int = 0
    tenant_kv_blocks: dict[str, int] = {}  # KV blocks of the largest tenants; shared blocks count per request


class Load(Figures, frozen=True, kw_only=True, tag="load"):
    """State and counters of an engine, sent by the engine server to every gateway with each heartbeat."""

    engine_id: str
    seq: int
    draining: bool = False
    running_for_s: float = 0.0  # uptime of the engine
    sleep: SleepState = SleepState.AWAKE
    sleep_problem: str = ""  # why the last sleep or wake command failed
    unacknowledged_replicas: list[str] = []  # gateway processes with open requests or unacknowledged usage


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
    ("prefill_done_requests", "Requests whose prompts it computed, and which other engines went on with."),
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
CLASS_GAUGES = (  # field, metric name, description
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
