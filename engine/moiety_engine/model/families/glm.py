"""GLM-4.5 and related models: the text model of GLM-4.5V, Solar Open and Sarvam's grouped-query models."""

from __future__ import annotations

from typing import Any

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


def glm4v_text_config(config: Config) -> Config:
    """Return the configuration of GLM-4.5V's text model with the keys of `glm4_moe`.

    Positions of text are the same in all sections of M-RoPE, which then is the usual rotation of part of each head.
    """
    defaults = {"attention_bias": True, "max_position_embeddings": 65536, "partial_rotary_factor": 0.5}
    defaults |= {"num_nextn_predict_layers": 0, "vocab_size": 151_424}
    stated = {key: _without_sections(value) for key, value in config.items()}
    return {**defaults, **stated, "model_type": "glm4_moe", "use_qk_norm": False}


def _without_sections(value: Any) -> Any:
    return {key: one for key, one in value.items() if key != "mrope_section"} if isinstance(value, dict) else value


def solar_open(config: Config, _index: int) -> LayerSpec:
    attention = read_attention(config, qkv_bias=bool(config["attention_bias"]))
    return LayerSpec(attention, read_sigmoid_experts(config))
