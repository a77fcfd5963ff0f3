"""Settings of the choice of engines."""

from __future__ import annotations

from enum import StrEnum

from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import live


class PrefixRouting(StrEnum):
    """Way to choose an engine by the prefix of a prompt."""

    KV_AWARE = "kv-aware"  # by the blocks that the engines' prefix caches have, and the engines' queued work
    AFFINITY = "affinity"  # by a hash of the first tokens


class RoutingSettings(ProcessSettings):
    """Settings of the choice of engines, and of engines that sleep."""

    prefix_routing: PrefixRouting = live(
        PrefixRouting.KV_AWARE,
        "How an engine is chosen by the prefix of a prompt. kv-aware: by the blocks that the engines' prefix caches "
        "have, where all engines of the model publish them. affinity: by a hash of the first tokens.",
    )
    expert_routing_tokens: int = live(
        0,
        "Largest number of prompt tokens that a request may cost more than at the cheapest engine, to reach one whose "
        "recent steps use more of the experts that it is expected to use (prefix_routing kv-aware, engines with "
        "--expert-profiles). 0: experts do not affect the choice of an engine.",
        ge=0,
        le=65_536,
    )
