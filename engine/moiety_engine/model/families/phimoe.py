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
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(config, qkv_bias=bias, output_bias=bias, window=config.get("sliding_window"))
    jitter = float(config.get("router_jitter_noise", 0.01))
    routing = read_routing(config, renormalize=False, scoring="sparse_mixer", jitter=jitter)
    return LayerSpec(attention, MoeSpec(config["intermediate_size"], routing, read_activation(config)))


def phimoe_features(config: Config) -> Features:
    """Normalisation by mean and variance, and a bias of the head."""
    return {
        "norm": NormSpec(config.get("rms_norm_eps", 1e-5), "layer"),
        "head_bias": bool(config.get("lm_head_bias", False)),
    }
