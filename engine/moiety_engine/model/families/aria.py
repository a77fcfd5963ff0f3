"""Aria, its text model."""

from __future__ import annotations

from moiety_engine.model.families.config import (
    Config,
    read_activation,
    read_attention,
    read_routing,
    read_shared,
    require,
    require_oblong_experts,
)
from moiety_engine.model.spec import LayerSpec, MoeSpec


def aria_text(config: Config, index: int) -> LayerSpec:
    """Return a layer; each has experts and shared experts."""
    require(config, "aria_text", mlp_bias=False, hidden_act="silu")
    width, bias, activation = config["intermediate_size"], bool(config["attention_bias"]), read_activation(config)
    require_oblong_experts(config, width, "aria_text")
    routing = read_routing(config, "moe_num_experts", top_k_key="moe_topk", renormalize=False, scoring="softmax_chosen")
    shared = read_shared(config["moe_num_shared_experts"] * width, activation)
    attention = read_attention(config, qkv_bias=bias, output_bias=bias)
    return LayerSpec(attention, MoeSpec(width, routing, activation, shared=shared))
