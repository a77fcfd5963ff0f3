"""LoadMetrics of an engine, and their descriptions as metrics.

The gateway exports them for all its engines, and each engine exports its own. The tables list fields of `LoadMetrics`
and `ClassLoad`. Counters are the fields that end in `_total`, listed without it. A gauge is exported without it as
well, since Prometheus reserves that suffix for counters.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from moiety_wire.fleet_service import ServiceReport


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


class LoadMetrics(msgspec.Struct, frozen=True):
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
    lost_transfers_total: int = 0  # … or whose KV was not sent or not received, and recomputed
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
    expert_read_bytes_total: int = 0  # bytes of experts' weights that steps read
    charged_expert_read_bytes_total: int = 0  # of these, bytes that requests were charged for
    charged_expert_moved_bytes_total: int = 0  # of loaded and moved bytes, those that requests were charged for
    rebalances_total: int = 0  # expert rebalances across ranks
    moved_expert_bytes_total: int = 0  # moved between ranks
    failed_expert_moves_total: int = 0  # moves that failed; the experts stayed where they were
    rank_balancedness: float = 1.0  # balancedness at the last evaluation of the load …
    rank_balancedness_planned: float = 1.0  # … and with the placement planned then
    excluded_ranks: int = 0  # excluded ranks; the others have their parts of the model
    expert_ranks: int = 0  # ranks that hold experts and nothing else
    can_change_expert_ranks: bool = False  # ranks that hold experts and nothing else can be added
    requested_expert_ranks: int = 0  # differs from `expert_ranks` while their number is changed
    expert_ranks_problem: str = ""  # why the last request to change their number failed
    expert_rank_changes_total: int = 0
    failed_expert_rank_changes_total: int = 0
    expert_rank_switch_seconds_total: float = 0.0  # time that steps waited while ranks switched to another number
    prefill_seconds_total: float = 0.0  # seconds of steps with prompt tokens, with or without decodes
    decode_seconds_total: float = 0.0  # seconds of all other steps
    grammars_waiting: int = 0
    grammar_compile_seconds_total: float = 0.0
    grammar_worker_restarts_total: int = 0
    images_waiting: int = 0  # requests whose images are not decoded
    images_waiting_bytes: int = 0  # files and pixels of these requests
    decoded_image_bytes: int = 0  # host memory for the pixels of recently decoded images
    decoded_image_hits_total: int = 0  # images of requests that were found there …
    decoded_image_misses_total: int = 0  # … and that were not
    decoded_image_evictions_total: int = 0
    decoded_images_total: int = 0
    refused_images_total: int = 0  # images that cannot be decoded within the limits
    failed_image_decodes_total: int = 0  # ended by something else than the image
    expired_image_waits_total: int = 0
    image_decode_seconds_total: float = 0.0
    image_cache_bytes_total: int = 0  # device memory for encoded images; a gauge, not a counter
    image_cache_bytes_used: int = 0
    image_cache_hits_total: int = 0  # images whose features were on the device when their prompt reached them …
    image_cache_misses_total: int = 0  # … and images that were encoded
    image_cache_evictions_total: int = 0
    encoded_image_tokens_total: int = 0
    image_encode_seconds_total: float = 0.0
    fleet_replicas: int = 0  # other replicas whose tenants' service reached this one lately
    remote_service_total: float = 0.0  # service of tenants on these, in the unit of the policy's counters
    tenant_kv_blocks: dict[str, int] = {}  # KV blocks of the largest tenants; shared blocks count per request
    pending_prefill_tokens: int = 0  # tokens that open requests have to compute before they decode
    active_experts: bytes = b""  # experts that recent decode steps used, a packed ExpertProfile; b"": not sampled


class Load(LoadMetrics, frozen=True, kw_only=True, tag="load"):
    """State and counters of an engine, sent by the engine server to every gateway with each heartbeat."""

    engine_id: str
    seq: int
    draining: bool = False
    running_for_s: float = 0.0  # uptime of the engine
    sleep: SleepState = SleepState.AWAKE
    sleep_problem: str = ""  # why the last sleep or wake command failed
    unacknowledged_replicas: list[str] = []  # gateway processes with open requests or unacknowledged usage
    tenant_service: ServiceReport | None = None  # None: the engine does not exchange it


GAUGES = (
    ("num_running", "Requests in the batch."),
    ("num_waiting", "Requests that wait in the queue."),
    ("num_paused", "Requests that are paused for lack of token credit; they are not in the batch."),
    ("pending_prefill_tokens", "Tokens that open requests have to compute before they decode."),
    ("kv_blocks_total", "Total blocks of the KV cache."),
    ("kv_blocks_used", "KV cache blocks that requests hold."),
    ("kv_blocks_cached", "Free KV cache blocks that hold a reusable prefix."),
    ("kv_blocks_kept", "Blocks on all cache tiers that are retained for returning conversations and evicted last."),
    ("host_blocks_total", "Total blocks of the host-memory cache tier."),
    ("host_blocks_used", "Blocks of the host-memory cache tier in use."),
    ("disk_bytes_total", "Disk limit of the prefix cache, in bytes; 0 without the disk tier."),
    ("disk_bytes_used", "Disk space that the prefix cache uses, in bytes."),
    ("disk_blocks_cached", "Prefix cache blocks on disk."),
    ("grammars_waiting", "Grammars of structured outputs that are queued for compilation or being compiled."),
    ("images_waiting", "Requests that wait for their images to be decoded."),
    ("images_waiting_bytes", "Files and pixels of the images that requests wait for, in bytes."),
    ("decoded_image_bytes", "Host memory for the pixels of recently decoded images, in bytes."),
    ("image_cache_bytes_total", "Device memory for encoded images, in bytes; 0 without a vision encoder."),
    ("image_cache_bytes_used", "Device memory that encoded images use, in bytes."),
    ("expert_slots", "Device slots for offloaded experts, over all layers."),
    (
        "rank_balancedness",
        "Mean expert load of the ranks divided by the largest, at the last evaluation; 1 if not evaluated.",
    ),
    ("rank_balancedness_planned", "Balancedness of the same load under the placement planned at that evaluation."),
    (
        "fleet_replicas",
        "Other replicas of the model whose tenants' service is counted here; 0 without the exchange between replicas.",
    ),
    ("excluded_ranks", "Ranks excluded at the last start; the other ranks hold their parts of the model."),
    ("expert_ranks", "Ranks that hold experts and nothing else (--ffn-ranks)."),
)
COUNTERS = (
    ("steps", "Steps that the engine has run."),
    ("prompt_tokens", "Prompt tokens of all requests."),
    ("cached_tokens", "Prompt tokens that were read from the prefix cache."),
    ("output_tokens", "Output tokens generated."),
    ("requests", "Requests received."),
    ("swapped_out_blocks", "KV cache blocks moved to the host-memory tier."),
    ("swapped_in_blocks", "KV cache blocks moved back from the host-memory tier."),
    ("attention_waited_seconds", "Seconds that rank 0 waited for the expert ranks (attention–FFN disaggregation)."),
    ("experts_waited_seconds", "Seconds that the expert ranks waited for attention, mean over the expert ranks."),
    ("host_hit_blocks", "Prefix blocks found in the host-memory tier."),
    ("disk_restored_blocks", "Prefix blocks restored from disk."),
    ("disk_restored_bytes", "Bytes of prefix blocks restored from disk."),
    ("disk_written_blocks", "Prefix cache blocks written to disk."),
    ("disk_written_bytes", "Prefix cache bytes written to disk."),
    ("disk_dropped_blocks", "Blocks not written because the disk was too slow, full or failing."),
    ("disk_failed_writes", "Failed disk writes; each one disables writing for a minute."),
    ("disk_waited_requests", "Requests that waited for blocks to be restored from disk."),
    (
        "disk_passed_over_requests",
        "Requests that recomputed a prefix on disk, because a restore was predicted to take longer.",
    ),
    ("disk_lost_files", "Cache files that were missing or corrupt when they were read."),
    ("tokens_past_stop", "Tokens computed for requests that had already stopped; they are not billed."),
    ("drafted_tokens", "Draft tokens proposed by speculative decoding; rejected ones are not billed."),
    ("accepted_tokens", "Draft tokens accepted."),
    ("prefill_done_requests", "Requests prefilled here and decoded by other engines (disaggregated prefill)."),
    ("disaggregated_decode_requests", "Requests decoded here whose prompt KV came from another engine."),
    ("lost_transfers", "Requests whose KV this engine did not send or did not receive; their prompts were recomputed."),
    ("speculative_tokens", "Prompt tokens computed by speculative prefill, while the engine was otherwise idle."),
    ("speculative_used_tokens", "Speculatively prefilled tokens that a later request used."),
    ("speculative_wasted_tokens", "Speculatively prefilled tokens that no request used before they expired."),
    ("expert_hits", "Offloaded experts that were on the device, or being loaded, when their layer ran."),
    ("expert_misses", "Offloaded experts that were not on the device when their layer ran."),
    ("prefetched_experts", "Offloaded experts that were prefetched to the device."),
    ("prefetched_expert_hits", "Prefetched experts that the next pass over their layer used."),
    ("expert_loaded_bytes", "Bytes of offloaded experts loaded to the device."),
    ("expert_read_bytes", "Bytes of expert weights that steps read: of each layer, each active expert once a step."),
    ("charged_expert_read_bytes", "Bytes of expert weights read that requests were charged for."),
    ("charged_expert_moved_bytes", "Bytes of expert weights loaded or moved that requests were charged for."),
    ("rebalances", "Expert rebalances across ranks (EPLB)."),
    ("moved_expert_bytes", "Bytes of expert weights moved between ranks."),
    ("expert_rank_changes", "Changes of the number of expert ranks while the engine served."),
    ("failed_expert_rank_changes", "Changes of the number of expert ranks that failed; the ranks of before went on."),
    (
        "expert_rank_switch_seconds",
        "Seconds that steps waited for all ranks to switch to another number of expert ranks.",
    ),
    ("failed_expert_moves", "Moves of experts between ranks that failed, after which the old placement stayed."),
    ("grammar_compile_seconds", "CPU seconds spent compiling grammars, rejected ones included."),
    ("grammar_worker_restarts", "Restarts of the grammar worker processes."),
    ("decoded_images", "Images that were decoded."),
    ("decoded_image_hits", "Images of requests that were found decoded."),
    ("decoded_image_misses", "Images of requests that had to be decoded."),
    ("decoded_image_evictions", "Decoded images dropped from host memory for newer ones."),
    ("refused_images", "Images that cannot be decoded within the limits."),
    ("failed_image_decodes", "Decodes that ended for another reason than their image; the client can try again."),
    ("expired_image_waits", "Requests whose images were not decoded within the time of their class."),
    ("image_decode_seconds", "Seconds of decoding images, by the clock."),
    ("image_cache_hits", "Images in prompts whose encoded features were on the device."),
    ("image_cache_misses", "Images that the vision encoder encoded."),
    ("image_cache_evictions", "Encoded images dropped from the device for newer ones."),
    ("encoded_image_tokens", "Tokens of images that the vision encoder computed."),
    ("image_encode_seconds", "Seconds of the vision encoder on the device."),
    (
        "remote_service",
        "Service that tenants received on other replicas as reported to this one, in prompt tokens plus twice the "
        "output tokens, divided by weight.",
    ),
    ("prefill_seconds", "Seconds of steps with prompt tokens."),
    ("decode_seconds", "Seconds of steps without prompt tokens."),
)
CLASS_GAUGES = (  # field, metric name, description
    ("num_waiting", "num_waiting", "Waiting requests of the class."),
    ("num_running", "num_running", "Running requests of the class."),
    ("predicted_ttft_s", "predicted_ttft_seconds", "Predicted TTFT of an empty prompt that arrives now."),
    (
        "oldest_waiting_unix_s",
        "oldest_waiting_timestamp_seconds",
        "Arrival of the longest-waiting request, as Unix time; 0 while none waits.",
    ),
)
CLASS_COUNTERS = (
    ("admitted", "Requests admitted to the class."),
    ("downgraded", "Requests of the class that were downgraded to its fallback class."),
    ("demoted", "Requests that could no longer attain their SLO and were scheduled after those that can."),
    ("boosted", "Requests that were scheduled ahead of others because they had waited too long."),
    ("recomputed_tokens", "Tokens recomputed after preemptions."),
)
CLASS_COUNTERS_BY_REASON = (
    ("rejected", "Requests of the class that were rejected."),
    ("preempted", "Preemptions of the class's requests."),
)
