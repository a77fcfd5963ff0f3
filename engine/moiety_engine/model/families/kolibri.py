"""Kolibri 1."""

from __future__ import annotations

from moiety_engine.model.families.config import (
    Config,
    is_sliding_layer,
    read_activation,
    read_attention,
    read_routing,
    read_shared,
)
from moiety_engine.model.rope_spec import NO_ROPE
from moiety_engine.model.spec import LayerSpec, MoeSpec


def kolibri1(config: Config, index: int) -> LayerSpec:
    """Return a layer; those with full attention have no rotary embedding if other layers have windows."""
    window = config["sliding_window"]
    sliding = is_sliding_layer(config, index, otherwise=bool((index + 1) % 5))
    features = {"window": window} if sliding else {} if window is None else {"rope": NO_ROPE}
    attention, activation = read_attention(config, qk_norm="head", **features), read_activation(config)
    renormalize = bool(config["norm_topk_prob"])
    routing = read_routing(config, "num_experts", renormalize=renormalize, scoring="sigmoid_chosen")
    experts = MoeSpec(
        config["moe_intermediate_size"],
        routing,
        activation,
        selection_bias=True,
        exact_router=True,
        shared=read_shared(config["shared_expert_intermediate_size"], activation),
    )
    return LayerSpec(attention, experts, attention_post_norm=True, ffn_post_norm=True)
