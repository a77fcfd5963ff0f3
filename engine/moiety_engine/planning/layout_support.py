"""Features of the engine on each layout of ranks: available, or refused at the start with the reason.

The answers come from the checks that every start makes. `layout_table` is the table of docs/layouts.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moiety_engine.config import EngineConfig, Offload, OffloadConfig, Speculate, TransferConfig
from moiety_engine.distribution.layout import layout_of, with_expert_ranks
from moiety_engine.errors import InvalidConfig
from moiety_wire.engine_choices import Batching
from moiety_wire.roles import EngineRole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moiety_engine.distribution.layout import Layout

LAYOUTS: dict[str, dict[str, Any]] = {  # smallest example of each layout
    "1 rank": {},
    "TP": {"tp": 2},
    "TP × EP": {"tp": 2, "ep": 2},
    "TP × EP × DCP": {"tp": 4, "ep": 2, "decode_context_parallel": 2},
    "PCP × EP": {"prefill_context_parallel": 2, "ep": 2},
    "DP attention × EP": {"dp_attention": 2, "ep": 2},
    "PP": {"pp": 2},
    "expert ranks": {"dp_attention": 2, "ffn_ranks": 2, "ep": 2},
}
_GRAPHS = "CUDA graphs cannot wait for other ranks: decode steps are launched kernel by kernel"
_RECORDED = "recorded decode steps of a CPU cannot wait for other ranks: decode steps run operation by operation"


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature, with the settings that enable it.

    `one_rank`: why it is off on several ranks, without an error. `check` raises InvalidConfig for a layout and a
    configuration that do not have the feature while the engine serves.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    one_rank: str = ""
    check: Callable[[Layout, EngineConfig], object] = lambda layout, _: layout


def _with_one_more_expert_rank(layout: Layout, config: EngineConfig) -> Layout:
    return with_expert_ranks(layout, layout.ffn_ranks + 1, steps_in_flight=config.steps_in_flight)


FEATURES: dict[str, Feature] = {
    "Continuous batching, chunked prefill": Feature(),
    "Padded batching": Feature({"batching": Batching.PADDED}),
    "Prefix cache": Feature({"prefix_caching": True}),
    "Host tier, preemption by swapping": Feature({"host_kv_memory_bytes": 1 << 20}),
    "Disk cache": Feature({"disk_cache": "cache"}),
    "LoRA adapters": Feature({"adapters": {"adapter": "folder"}}),
    "Structured outputs": Feature(),
    "Embeddings": Feature(),
    "Images": Feature(),
    "N-gram speculation": Feature({"speculate": Speculate.NGRAM}),
    "Draft-model speculation": Feature({"speculate": Speculate.DRAFT, "draft_model": "folder"}),
    "MTP speculation": Feature({"speculate": Speculate.MTP}),
    "Disaggregated prefill and decode": Feature({"transfer": TransferConfig(role=EngineRole.PREFILL)}),
    "KV transfer from other engines": Feature({"transfer": TransferConfig(listen="tcp://127.0.0.1:5556")}),
    "Expert offloading": Feature({"offload": OffloadConfig(what=Offload.EXPERTS, folder="folder")}),
    "int8, int4 and fp8 weights": Feature({"quantization": "int8"}),
    "Batch invariance": Feature({"batch_invariant": True}),
    "CUDA graphs": Feature(one_rank=_GRAPHS),
    "Recorded decode steps on a CPU": Feature(one_rank=_RECORDED),
    "Sleep mode": Feature(),
    "Redundant experts, online rebalancing": Feature({"redundant_experts": 2, "rebalance_every_s": 5.0}),
    "Exclusion of failed ranks": Feature({"exclude_rank_after_s": 10.0}),
    "Adding and removing expert ranks": Feature(check=_with_one_more_expert_rank),
}


def why_unavailable(feature: str, layout: str) -> str:
    """Return why a feature is not available on a layout; "" if it is."""
    found = FEATURES[feature]
    try:
        config = EngineConfig(model="folder", name="name", **LAYOUTS[layout], **found.settings)
        layout_found = layout_of(config)
        found.check(layout_found, config)
        ranks = layout_found.num_ranks
    except InvalidConfig as exc:
        return str(exc)
    return found.one_rank if ranks > 1 else ""


def layout_table() -> str:
    """Return the tables of docs/layouts.md in Markdown: the features on each layout, and the reasons."""
    reasons: dict[str, int] = {}
    lines = [f"| feature | {' | '.join(LAYOUTS)} |", f"|---{'|---' * len(LAYOUTS)}|"]
    for feature in FEATURES:
        cells = []
        for layout in LAYOUTS:
            reason = why_unavailable(feature, layout)
            cells.append(f"no ({reasons.setdefault(reason, len(reasons) + 1)})" if reason else "yes")
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    lines += ["", "| reason | message |", "|---|---|"]
    lines += [f"| {number} | {reason} |" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"
