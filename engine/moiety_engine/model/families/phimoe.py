"""Phi-3.5-MoE."""

from __future__ import annotations

from moiety_engine.model.families.config import (
    Config,
    Features,
    read_activation,
    read_attention,
    read_routing,
)
from moiety_engine.model.spec import LayerSpec, MoeSpec, NormSpec


def phimoe(config: Config, _index: int) -> LayerSpec:
    bias = bool(config["attention_bias"])
    attention = read_attention(config, qkv_bias=bias, output_bias=bias, window=config.get("sliding_window"))
    jitter = float(config["router_jitter_noise"])
    routing = read_routing(config, "num_local_experts", renormalize=False, scoring="sparse_mixer", jitter=jitter)
    return LayerSpec(attention, MoeSpec(config["intermediate_size"], routing, read_activation(config)))


def phimoe_features(config: Config) -> Features:
    """Return the features of Phi-3.5-MoE: layer norm, and a bias of the output head."""
    return {
        "norm": NormSpec(float(config["rms_norm_eps"]), "layer"),
        "head_bias": bool(config["lm_head_bias"]),
    }
