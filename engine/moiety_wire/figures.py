"""What the figures of a Load mean, for whoever shows them as metrics: the gateway of all its engines, and each engine
of itself. Fields of `Load` and of `ClassLoad`; counters are the fields that
end in `_total`, named without it, and so is a gauge, since Prometheus keeps that ending for counters."""

from __future__ import annotations

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
    ("expert_slots", "Slots on the device for offloaded experts, of all layers."),
    ("rank_balancedness", "Mean load of ranks by experts, over the largest, when last judged; 1 where nothing is."),
    ("rank_balancedness_planned", "The same load, by where experts were moved then."),
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
    ("overshot_tokens", "Tokens computed for requests that had ended by then; nobody pays for them."),
    ("drafted_tokens", "Tokens guessed and computed, of speculative decoding; nobody pays for a guess."),
    ("accepted_tokens", "Of these, tokens that came true."),
    ("handed_over_requests", "Requests whose prompts it computed, and which other engines went on with."),
    ("taken_over_requests", "Requests that came with their prompt's KV from another engine."),
    ("lost_transfers", "Requests that came without it, although it was to come; it computed their prompts again."),
    ("foreseen_tokens", "Prompt tokens computed before anybody asked for them, while nothing else was to be done."),
    ("foreseen_used_tokens", "Of these, tokens that a request began with."),
    ("foreseen_wasted_tokens", "Of these, tokens that no request began with in time."),
    ("expert_hits", "Offloaded experts that were on the device, or on their way, when a pass over their layer came."),
    ("expert_misses", "Offloaded experts that were not."),
    ("prefetched_experts", "Offloaded experts fetched before a pass asked for them."),
    ("prefetched_expert_hits", "Of these, experts that the next pass over their layer asked for."),
    ("expert_loaded_bytes", "Bytes of offloaded experts that were brought to the device."),
    ("rebalances", "Times that experts were moved between its ranks."),
    ("moved_expert_bytes", "Weights of experts that ranks sent each other."),
)
CLASS_GAUGES = (  # the field, what it is called as a metric, and what it means
    ("num_waiting", "num_waiting", "Requests of the class that wait."),
    ("num_running", "num_running", "Requests of the class in the batch."),
    ("predicted_ttft_s", "predicted_ttft_seconds", "Predicted time to first token of an empty prompt."),
)
CLASS_COUNTERS = (
    ("admitted", "Requests admitted to the class."),
    ("downgraded", "Requests of the class that were served in its fallback."),
    ("relegated", "Requests that could not keep their promise any more and were put behind those that can."),
    ("boosted", "Requests that had waited too long and were put before others."),
    ("recomputed_tokens", "Tokens computed again after preemptions."),
)
CLASS_COUNTERS_BY_REASON = (
    ("rejected", "Requests of the class that were rejected."),
    ("preempted", "Preemptions of the class's requests."),
)
