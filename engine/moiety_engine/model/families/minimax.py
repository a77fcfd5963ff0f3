"""MiniMax-M2."""

from __future__ import annotations

from dataclasses import replace

from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    read_activation,
    read_attention,
    read_routing,
    require,
    rope_parameters,
)
from moiety_engine.model.spec import AttentionSpec, LayerSpec, MoeSpec


def minimax_m2(config: Config, _index: int) -> LayerSpec:
    require(config, "minimax_m2", scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer")
    require(config, "minimax_m2", use_routing_bias=True, shared_intermediate_size=0)
    routing = read_routing(config, "num_local_experts", renormalize=True, scoring="sigmoid")
    experts = MoeSpec(
        config["intermediate_size"], routing, read_activation(config), selection_bias=True, exact_router=True
    )
    return LayerSpec(_attention(config), experts)


def _attention(config: Config) -> AttentionSpec:
    """Return the attention; released checkpoints state the rotated part of a head as a width, `rotary_dim`."""
    attention = read_attention(config, qk_norm="full")
    rotary_width = config.get("rotary_dim")
    partial = first(rope_parameters(config), "partial_rotary_factor") or first(config, "partial_rotary_factor")
    if rotary_width is None or partial is not None:
        return attention
    return replace(attention, rope=replace(attention.rope, rotary_width=rotary_width))


def minimax_m2_features(_config: Config) -> Features:
    """Return the prefixes of multi-token prediction layers, which released checkpoints announce but do not have."""
    return {"ignored_prefixes": ("model.mtp.",)}
