"""GLM-4.5 and related models: Solar Open and Sarvam's grouped-query models."""

from __future__ import annotations

from moiety_engine.model.families.config import (
    Config,
    read_attention,
    read_sigmoid_experts,
    read_sigmoid_mixture,
)
from moiety_engine.model.spec import LayerSpec


def glm4_moe(config: Config, index: int) -> LayerSpec:
    attention = read_attention(
        config,
        qkv_bias=bool(config["attention_bias"]),
        qk_norm="head" if config["use_qk_norm"] else "none",
    )
    return LayerSpec(attention, read_sigmoid_mixture(config, index))


def solar_open(config: Config, _index: int) -> LayerSpec:
    attention = read_attention(config, qkv_bias=bool(config["attention_bias"]))
    return LayerSpec(attention, read_sigmoid_experts(config))
