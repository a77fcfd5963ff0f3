"""OLMoE."""

from __future__ import annotations

from moiety_engine.model.families.config import Config, read_activation, read_attention, read_routing
from moiety_engine.model.spec import LayerSpec, MoeSpec


def olmoe(config: Config, _index: int) -> LayerSpec:
    bias = bool(config["attention_bias"])
    attention = read_attention(config, qkv_bias=bias, output_bias=bias, qk_norm="full", clip=config.get("clip_qkv"))
    routing = read_routing(config, "num_experts", renormalize=bool(config["norm_topk_prob"]))
    return LayerSpec(attention, MoeSpec(config["intermediate_size"], routing, read_activation(config)))
