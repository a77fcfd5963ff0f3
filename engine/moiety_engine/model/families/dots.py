"""Reader of dots.llm1 configurations."""

from __future__ import annotations

from moiety_engine.model.families.config import Config, read_attention, read_sigmoid_mixture
from moiety_engine.model.spec import LayerSpec


def dots1(config: Config, index: int) -> LayerSpec:
    bias = bool(config["attention_bias"])
    window = _window(config, index)
    attention = read_attention(config, qkv_bias=bias, output_bias=bias, qk_norm="head", window=window)
    return LayerSpec(attention, read_sigmoid_mixture(config, index))


def _window(config: Config, index: int) -> int | None:
    kinds = config.get("layer_types")
    slides = index >= config["max_window_layers"] if kinds is None else kinds[index] == "sliding_attention"
    return config["sliding_window"] if slides else None
