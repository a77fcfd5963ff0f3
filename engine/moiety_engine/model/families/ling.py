"""Ling 2.0 and Ring 2.0 (BailingMoeV2), whose classes come with the checkpoints."""

from __future__ import annotations

from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    read_activation,
    read_attention,
    read_mtp,
    read_rope,
    read_routing,
    read_shared,
    require,
    rope_parameters,
)
from moiety_engine.model.rope_spec import RopeSpec
from moiety_engine.model.spec import DenseSpec, LayerSpec, MoeSpec


def bailing_moe(config: Config, index: int) -> LayerSpec:
    require(config, "bailing_moe", score_function="sigmoid", moe_router_enable_expert_bias=True, use_rmsnorm=True)
    require(config, "bailing_moe", norm_head=False, norm_softmax=False)
    attention = read_attention(
        config,
        rope=_rope(config),
        qkv_bias=bool(config["use_qkv_bias"]),
        output_bias=bool(config["use_bias"]),
        qk_norm="head" if config["use_qk_norm"] else "none",
    )
    activation, width = read_activation(config), config["moe_intermediate_size"]
    if index < config["first_k_dense_replace"]:
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=activation))
    routing = read_routing(
        config,
        "num_experts",
        renormalize=bool(config["norm_topk_prob"]),
        scoring="sigmoid",
        num_groups=config["n_group"],
        top_groups=config["topk_group"],
        group_score="best_two",
        scale=float(config["routed_scaling_factor"]),
    )
    of_one = first(config, "moe_shared_expert_intermediate_size", default=width)
    shared = read_shared(first(config, "num_shared_experts", default=0) * of_one, activation)
    return LayerSpec(
        attention, MoeSpec(width, routing, activation, selection_bias=True, exact_router=True, shared=shared)
    )


def _rope(config: Config) -> RopeSpec:
    """Return the rotary embedding, whose part of a head is stated as a share or as a width, `rotary_dim`."""
    head_dim = first(config, "head_dim", default=config["hidden_size"] // config["num_attention_heads"])
    partial = first(rope_parameters(config), "partial_rotary_factor") or first(config, "partial_rotary_factor")
    rotary_width = config.get("rotary_dim")
    if partial is None and rotary_width:
        return read_rope(config | {"partial_rotary_factor": rotary_width / head_dim}, head_dim)
    return read_rope(config, head_dim)


def bailing_features(config: Config) -> Features:
    return read_mtp(config, bailing_moe)
