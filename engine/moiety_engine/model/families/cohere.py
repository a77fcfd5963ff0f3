"""Cohere 2 with experts."""

from __future__ import annotations

from dataclasses import replace

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    read_activation,
    read_attention,
    read_routing,
    rope_from,
    rope_parameters,
)
from moiety_engine.model.rope_spec import NO_ROPE
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, MoeSpec, NormSpec, SharedSpec


def cohere2_moe(config: Config, index: int) -> LayerSpec:
    """Return a layer, whose attention and feed-forward both read the layer's normalized input."""
    is_dense = _is_dense(config, index)
    if not is_dense:
        return LayerSpec(_attention(config, index, is_dense=False), _experts(config), parallel=True)
    width = first(config, "prefix_dense_intermediate_size", default=config["intermediate_size"])
    ffn = DenseSpec(width, activation=read_activation(config))
    return LayerSpec(_attention(config, index, is_dense=True), ffn, parallel=True)


def _is_dense(config: Config, index: int) -> bool:
    kinds = config.get("mlp_layer_types")
    return bool(kinds[index] == "dense" if kinds else index < first(config, "first_k_dense_replace", default=0))


def _attention(config: Config, index: int, *, is_dense: bool) -> AttentionSpec:
    """Return the attention; layers without a window have no rotary embedding, unless they are dense ones before all."""
    num_dense, kinds = first(config, "first_k_dense_replace", default=0), config.get("layer_types")
    of_dense, pattern = config["prefix_dense_sliding_window_pattern"], config["sliding_window_pattern"]
    by_pattern = (index + 1) % of_dense if index < num_dense else (index - num_dense + 1) % pattern
    kind = kinds[index] if kinds else "sliding_attention" if by_pattern else "full_attention"
    if kind not in ("sliding_attention", "full_attention"):
        known = "full_attention, sliding_attention"
        raise UnsupportedModelError(f"layer type {kind!r} is not supported; known: {known}")
    window = config["sliding_window"] if kind == "sliding_attention" else None
    bias, rotates = bool(config["attention_bias"]), window is not None or (is_dense and of_dense == 1)
    rotary = {"rope_theta": config["rope_theta"]} | rope_parameters(config)  # whose own base precedes
    rope = replace(rope_from(config, rotary, config["head_dim"]), interleaved=True) if rotates else NO_ROPE
    return read_attention(config, rope=rope, qkv_bias=bias, output_bias=bias, window=window)


def _experts(config: Config) -> MoeSpec:
    selection, combination = config["expert_selection_fn"], config["shared_expert_combination_strategy"]
    if selection not in ("softmax", "sigmoid") or combination not in ("average", "sum"):
        raise UnsupportedModelError(
            f"expert_selection_fn {selection!r} with shared_expert_combination_strategy {combination!r} is not "
            "supported; known: softmax and sigmoid, average and sum"
        )
    width, num_shared, activation = config["intermediate_size"], config["num_shared_experts"], read_activation(config)
    share = 0.5 if num_shared and combination == "average" else 1.0
    routing = read_routing(
        config,
        "num_experts",
        renormalize=bool(config["norm_topk_prob"]) and selection == "sigmoid",
        scoring="sigmoid_chosen" if selection == "sigmoid" else "softmax_chosen",
        scale=share,
    )
    dense = DenseSpec(num_shared * width, activation=activation)
    return MoeSpec(width, routing, activation, shared=SharedSpec(dense, factor=share) if num_shared else None)


def cohere2_moe_features(config: Config) -> Features:
    """Return the features of Cohere 2: layer norms without a bias, or RMS norms, and scaled logits."""
    eps = config["rms_norm_eps"]
    norm = NormSpec(float(config["layer_norm_eps"]), kind="layer") if eps is None else NormSpec(float(eps))
    return {"norm": norm, "logits_multiplier": float(config["logit_scale"]), "zero_if_absent": ("norm.bias",)}
