"""Mixtral."""

from __future__ import annotations

from moiety_engine.model.families.config import Config, read_activation, read_attention, read_routing
from moiety_engine.model.spec import LayerSpec, MoeSpec


def mixtral(config: Config, _index: int) -> LayerSpec:
    attention = read_attention(config, window=config.get("sliding_window"))
    return LayerSpec(
        attention,
        MoeSpec(
            config["intermediate_size"],
            read_routing(config, "num_local_experts", renormalize=True),
            read_activation(config),
        ),
    )
