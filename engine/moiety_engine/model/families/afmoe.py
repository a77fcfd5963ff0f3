"""AFMoE (Trinity)."""

from __future__ import annotations

from moiety_engine.model.attention_options import OutputGateSpec
from moiety_engine.model.families.config import (
    Config,
    Features,
    is_sliding_layer,
    read_activation,
    read_attention,
    read_routing,
    read_shared,
    require,
)
from moiety_engine.model.rope_spec import NO_ROPE
from moiety_engine.model.spec import DenseSpec, LayerSpec, MoeSpec


def afmoe(config: Config, index: int) -> LayerSpec:
    """Return a layer; those with full attention have no rotary embedding."""
    require(config, "afmoe", score_func="sigmoid", route_norm=True, num_expert_groups=1, num_limited_groups=1)
    every = config["global_attn_every_n_layers"]
    sliding, bias = is_sliding_layer(config, index, otherwise=bool((index + 1) % every)), bool(config["attention_bias"])
    attention = read_attention(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        gate=OutputGateSpec("sigmoid"),
        **({"window": config["sliding_window"]} if sliding else {"rope": NO_ROPE}),
    )
    return LayerSpec(attention, _feed_forward(config, index), attention_post_norm=True, ffn_post_norm=True)


def _feed_forward(config: Config, index: int) -> DenseSpec | MoeSpec:
    activation = read_activation(config)
    if index < config["num_dense_layers"]:
        return DenseSpec(config["intermediate_size"], activation=activation)
    scale, width = float(config["route_scale"]), config["moe_intermediate_size"]
    routing = read_routing(config, "num_experts", renormalize=True, scoring="sigmoid", scale=scale)
    shared = read_shared(config["num_shared_experts"] * width, activation)
    return MoeSpec(width, routing, activation, selection_bias=True, shared=shared)


def afmoe_features(config: Config) -> Features:
    """Return the factor of embeddings, if maximal update parametrization (muP) is on."""
    return {"embedding_multiplier": config["hidden_size"] ** 0.5 if config["mup_enabled"] else 1.0}
