"""Cost of a request at a replica, in prompt tokens: those beyond the cached prefix, and the work queued before them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from moiety_platform.engine_client.base import EngineState
from moiety_platform.routing.expert_profiles import ExpertPreference
from moiety_platform.routing.prefix_names import PrefixNames

RUNNING_TOKENS = 64  # a running request delays a prompt by about as much as this many prompt tokens
SAME_COST_TOKENS = 16  # costs that differ by less are equal


def block_size_of(engines: Sequence[EngineState]) -> int:
    """Return the block size of the prefix caches, in tokens; 0 unless all engines publish blocks of one size.

    It is 0 too while the snapshot of an engine has not begun: its cache is not known to be empty.
    """
    size = 0
    for engine in engines:
        blocks, load = engine.prefix_blocks, engine.load
        if blocks is None or not blocks.is_known or load is None or not load.block_size:
            return 0
        if size not in (0, load.block_size):
            return 0
        size = load.block_size
    return size


def cheapest(
    engines: Sequence[EngineState],
    prefix: PrefixNames,
    rng: random.Random,
    experts: ExpertPreference | None = None,
) -> EngineState:
    """Return the engine at which the request costs least; of several, a random one.

    All of `engines` publish their blocks (`block_size_of`). A wait weighs as many tokens as the engine computes in that
    time, so a prefix that many prompts share is computed again elsewhere once its engines are loaded. Engines whose
    reports are stale are considered only if all are. The cached prefixes are estimated, and the estimate of the chosen
    engine is verified block by block; if it was too long, the choice is repeated with the exact length.

    With `experts`, an engine whose steps use the request's experts costs less.
    """
    fresh = [engine for engine in engines if engine.load_is_fresh] or engines
    queued = [queued_tokens(engine) for engine in fresh]
    if experts is not None and (saved := experts.saved_tokens(fresh)) is not None:
        queued = [tokens - less for tokens, less in zip(queued, saved, strict=True)]
    hits = [0 if one.prefix_blocks is None else one.prefix_blocks.estimate_prefix(prefix.names) for one in fresh]
    costs = [_cost(prefix, num_blocks, tokens) for num_blocks, tokens in zip(hits, queued, strict=True)]
    while True:
        least = min(costs)
        index = rng.choice([index for index, cost in enumerate(costs) if cost == least])
        blocks = fresh[index].prefix_blocks
        num_blocks = 0 if blocks is None else blocks.longest_prefix(prefix.names[: hits[index]])
        if num_blocks == hits[index]:
            return fresh[index]
        hits[index], costs[index] = num_blocks, _cost(prefix, num_blocks, queued[index])


def queued_tokens(engine: EngineState) -> int:
    """Return the work before a new request at the engine, in prompt tokens.

    It is the tokens that its open requests have to compute before they decode, and a share for each running request.
    The engine's report is up to one heartbeat old and contains the requests of all gateways, so those that this gateway
    has sent since count with the mean of computed prompt tokens.
    """
    load = engine.load
    if load is None:
        return 0
    computed = max(0, load.prompt_tokens_total - load.cached_tokens_total)
    new_tokens = engine.num_unreported * computed // load.requests_total if load.requests_total else 0
    return load.pending_prefill_tokens + new_tokens + load.num_running * RUNNING_TOKENS


def _cost(prefix: PrefixNames, num_blocks: int, queued: int) -> int:
    return (prefix.num_tokens - num_blocks * prefix.block_size + queued) // SAME_COST_TOKENS
