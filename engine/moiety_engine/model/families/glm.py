"""GLM-4.5 and its kin."""

from __future__ import annotations

from moiety_engine.model.families.config import (
    Config,
    Features,
    read_attention,
    read_foretelling,
    read_sigmoid_mixture,
)
from moiety_engine.model.spec import LayerSpec


def glm4_moe(config: Config, index: int) -> LayerSpec:
    attention = read_attention(
        {"partial_rotary_factor": 0.5} | config,
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm="head" if config.get("use_qk_norm") else "none",
    )
    usual = {"first_k_dense_replace": 1, "norm_topk_prob": True, "n_shared_experts": 1}
    return LayerSpec(attention, read_sigmoid_mixture(usual | config, index))


def glm_features(config: Config) -> Features:
    return read_foretelling(config, glm4_moe)
