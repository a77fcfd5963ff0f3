"""Granite, with and without experts, and Granite 4.0 with Mamba-2 layers."""

from __future__ import annotations

from dataclasses import replace

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    is_sliding_layer,
    read_activation,
    read_attention,
    read_routing,
    read_shared,
)
from moiety_engine.model.families.mamba2 import read_mamba2
from moiety_engine.model.rope_spec import NO_ROPE
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, MoeSpec


def granite(config: Config, _index: int) -> LayerSpec:
    mlp_bias = bool(config["mlp_bias"])
    return LayerSpec(_attention(config), DenseSpec(config["intermediate_size"], mlp_bias, read_activation(config)))


def granitemoe(config: Config, _index: int) -> LayerSpec:
    routing = read_routing(config, "num_local_experts", renormalize=False, scoring="softmax_chosen")
    return LayerSpec(_attention(config), MoeSpec(config["intermediate_size"], routing, read_activation(config)))


def granitemoeshared(config: Config, index: int) -> LayerSpec:
    layer = granitemoe(config, index)
    assert isinstance(layer.ffn, MoeSpec)
    shared = read_shared(config["shared_intermediate_size"], layer.ffn.activation)
    return replace(layer, ffn=replace(layer.ffn, shared=shared))


def granitemoe_swa(config: Config, index: int) -> LayerSpec:
    """Return a layer with attention sinks; layers may have windows, and a rotary base of their own or none (0)."""
    layer = granitemoeshared(config, index)
    sliding, thetas = is_sliding_layer(config, index, otherwise=index % 4 != 0), config.get("layer_rope_theta")
    assert isinstance(layer.attention, AttentionSpec)
    rope = layer.attention.rope
    if thetas is not None:
        rope = replace(rope, theta=float(thetas[index])) if thetas[index] else NO_ROPE
    window = config["sliding_window"] if sliding else None
    return replace(layer, attention=replace(layer.attention, rope=rope, window=window, sinks=True))


def granitemoehybrid(config: Config, index: int) -> LayerSpec:
    """Return a layer with Mamba-2 or attention, and with shared experts only or with routed ones too."""
    if config["num_local_experts"]:
        ffn = granitemoeshared(config, index).ffn
    else:
        ffn = DenseSpec(config["shared_intermediate_size"], activation=read_activation(config))
    kind = config["layer_types"][index] if config.get("layer_types") else "mamba"
    if kind in ("mamba", "linear_attention"):
        inner = config["mamba_expand"] * config["hidden_size"]
        return LayerSpec(read_mamba2(config, inner, "mamba_expand × hidden_size, "), ffn)
    if kind not in ("attention", "full_attention"):
        raise UnsupportedModelError(
            f"layer type {kind!r} is not supported in granitemoehybrid; known: mamba, attention"
        )
    attention = _attention(config)
    if config.get("position_embedding_type") != "rope":
        attention = replace(attention, rope=NO_ROPE)
    return LayerSpec(attention, ffn)


def _attention(config: Config) -> AttentionSpec:
    bias = bool(config["attention_bias"])
    scale = float(config["attention_multiplier"])
    return read_attention(config, qkv_bias=bias, output_bias=bias, scale=scale)


def granite_features(config: Config) -> Features:
    """Return the multipliers of embeddings, of the layers' residual contributions, and of logits."""
    return {
        "embedding_multiplier": float(config["embedding_multiplier"]),
        "residual_multiplier": float(config["residual_multiplier"]),
        "logits_multiplier": 1 / float(config["logits_scaling"]),
    }
