"""Mistral."""

from __future__ import annotations

from moiety_engine.model.families.config import Config, read_activation, read_attention
from moiety_engine.model.spec import DenseSpec, LayerSpec


def mistral(config: Config, _index: int) -> LayerSpec:
    window = config["sliding_window"]  # null in later releases
    return LayerSpec(
        read_attention(config, window=window),
        DenseSpec(config["intermediate_size"], activation=read_activation(config)),
    )
