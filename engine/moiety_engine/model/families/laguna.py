"""Laguna and Mellum 2, whose kinds of layers have rotary embeddings of their own."""

from __future__ import annotations

from moiety_engine.model.attention_options import OutputGateSpec
from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    is_dense_layer,
    is_sliding_layer,
    read_activation,
    read_attention,
    read_routing,
    read_shared,
    require,
    rope_of_kind,
)
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, MoeSpec


def laguna(config: Config, index: int) -> LayerSpec:
    """Return a layer; layers may differ in their number of query heads."""
    require(config, "laguna", moe_apply_router_weight_on_input=False, moe_router_logit_softcapping=0.0)
    heads = config.get("num_attention_heads_per_layer")
    own = config if heads is None else config | {"num_attention_heads": heads[index]}
    bias, activation = bool(config["attention_bias"]), read_activation(config)
    attention = _attention(own, index, qkv_bias=bias, output_bias=bias, gate=_gate(config))
    if is_dense_layer(config, index):
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=activation))
    scale = float(config["moe_routed_scaling_factor"])
    routing = read_routing(config, "num_experts", renormalize=True, scoring="sigmoid", scale=scale)
    shared = read_shared(config["shared_expert_intermediate_size"], activation)
    experts = MoeSpec(config["moe_intermediate_size"], routing, activation, selection_bias=True, shared=shared)
    return LayerSpec(attention, experts)


def mellum(config: Config, index: int) -> LayerSpec:
    bias, activation = bool(config["attention_bias"]), read_activation(config)
    attention = _attention(config, index, qkv_bias=bias, output_bias=bias)
    if is_dense_layer(config, index, num_dense=0):
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=activation))
    routing = read_routing(config, "num_experts", renormalize=bool(config["norm_topk_prob"]))
    return LayerSpec(attention, MoeSpec(config["moe_intermediate_size"], routing, activation))


def mellum_features(_config: Config) -> Features:
    """Return the prefix of the multi-token prediction layer, which is not loaded."""
    return {"ignored_prefixes": ("mtp.",)}


def _attention(config: Config, index: int, **features: object) -> AttentionSpec:
    sliding = is_sliding_layer(config, index, otherwise=False)
    rope = rope_of_kind(config, "sliding_attention" if sliding else "full_attention", config["head_dim"])
    window = config["sliding_window"]
    return read_attention(config, rope=rope, window=window if sliding else None, qk_norm="head", **features)


def _gate(config: Config) -> OutputGateSpec:
    gating = config["gating"]
    if gating not in (True, "per-head", "per-element"):
        raise UnsupportedModelError(f"gating {gating!r} is not supported in laguna; known: true, per-head, per-element")
    return OutputGateSpec("softplus", per_head=gating != "per-element")
