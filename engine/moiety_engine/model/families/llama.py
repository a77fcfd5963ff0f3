"""Llama."""

from __future__ import annotations

from moiety_engine.model.families.config import Config, read_activation, read_attention
from moiety_engine.model.spec import DenseSpec, LayerSpec


def llama(config: Config, _index: int) -> LayerSpec:
    """Return the spec of a Llama layer."""
    bias = bool(config["attention_bias"])
    attention = read_attention(config, qkv_bias=bias, output_bias=bias)
    mlp_bias = bool(config["mlp_bias"])
    return LayerSpec(attention, DenseSpec(config["intermediate_size"], mlp_bias, read_activation(config)))
