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
    ("host_blocks_total", "Blocks of the host-memory tier."),
    ("host_blocks_used", "Blocks of the host-memory tier in use."),
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
    ("overshot_tokens", "Tokens computed for requests that had ended by then; nobody pays for them."),
    ("drafted_tokens", "Tokens guessed and computed, of speculative decoding; nobody pays for a guess."),
    ("accepted_tokens", "Of these, tokens that came true."),
    ("handed_over_requests", "Requests whose prompts it computed, and which other engines went on with."),
    ("taken_over_requests", "Requests that came with their prompt's KV from another engine."),
    ("lost_transfers", "Requests that came without it, although it was to come; it computed their prompts again."),
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
