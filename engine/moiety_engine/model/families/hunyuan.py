"""Hunyuan-A13B (Hunyuan V1 with experts)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    first,
    read_activation,
    read_attention,
    read_routing,
    read_shared,
    require,
    rope_parameters,
)
from moiety_engine.model.spec import AttentionSpec, LayerSpec, MoeSpec


def hunyuan_v1_moe(config: Config, _index: int) -> LayerSpec:
    require(
        config, "hunyuan_v1_moe", use_cla=False, use_mla=False, use_qk_norm=True, attention_head_dim=_head_dim(config)
    )
    activation, width = read_activation(config), config["intermediate_size"]
    if _of_all_layers(config, "moe_intermediate_size", width) != width:
        raise UnsupportedModelError("moe_intermediate_size must equal intermediate_size in hunyuan_v1_moe")
    if _of_all_layers(config, "num_shared_expert", 1) != 1:
        raise UnsupportedModelError("num_shared_expert must be 1 in hunyuan_v1_moe")
    counts = {key: _of_all_layers(config, key, 1) for key in ("num_experts", "moe_topk")}
    routing = read_routing(counts, "num_experts", top_k_key="moe_topk", renormalize=True)
    shared = read_shared(width, activation)
    return LayerSpec(_attention(config), MoeSpec(width, routing, activation, exact_router=True, shared=shared))


def _attention(config: Config) -> AttentionSpec:
    """Return the attention; `alpha` of its rotary embedding enlarges the base for all lengths (NTK-aware scaling)."""
    bias = bool(config["attention_bias"])
    attention = read_attention(config, qkv_bias=bias, output_bias=bias, qk_norm="head", rotates_first=True)
    parameters, width = rope_parameters(config), attention.head_dim
    alpha = parameters.get("alpha")
    if not alpha or first(parameters, "rope_type", "type", default="default") != "dynamic":
        return attention
    theta = attention.rope.theta * float(alpha) ** (width / (width - 2))
    return replace(attention, rope=replace(attention.rope, theta=theta))


def _head_dim(config: Config) -> int:
    return int(first(config, "head_dim", default=config["hidden_size"] // config["num_attention_heads"]))


def _of_all_layers(config: Config, key: str, default: int) -> Any:
    """Return a setting that is one number, or a list with the same number for each layer."""
    value = first(config, key, default=default)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UnsupportedModelError(f"{key} {value} differs by layer, which is not supported in hunyuan_v1_moe")
    return value[0]
