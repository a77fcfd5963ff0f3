"""Mistral."""

from __future__ import annotations

from moiety_engine.model.families.config import Config, read_activation, read_attention
from moiety_engine.model.spec import DenseSpec, LayerSpec


def mistral(config: Config, _index: int) -> LayerSpec:
    window = config.get("sliding_window", 4096)  # the family's own default; later releases say null
    return LayerSpec(
        read_attention(config, window=window),
        DenseSpec(config["intermediate_size"], activation=read_activation(config)),
    )
