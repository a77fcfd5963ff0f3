"""OLMoE and FlexOlmo."""

from __future__ import annotations

from moiety_engine.model.families.config import Config, read_activation, read_attention, read_routing
from moiety_engine.model.spec import LayerSpec, MoeSpec


def olmoe(config: Config, _index: int) -> LayerSpec:
    bias = bool(config["attention_bias"])
    attention = read_attention(config, qkv_bias=bias, output_bias=bias, qk_norm="full", clip=config.get("clip_qkv"))
    routing = read_routing(config, "num_experts", renormalize=bool(config["norm_topk_prob"]))
    return LayerSpec(attention, MoeSpec(config["intermediate_size"], routing, read_activation(config)))


def flex_olmo(config: Config, _index: int) -> LayerSpec:
    """Return a layer of FlexOlmo, which normalizes the outputs of its halves in place of their inputs."""
    bias = bool(config["attention_bias"])
    attention = read_attention(config, qkv_bias=bias, output_bias=bias, qk_norm="full")
    routing = read_routing(config, "num_experts", renormalize=bool(config["norm_topk_prob"]))
    experts = MoeSpec(config["intermediate_size"], routing, read_activation(config))
    return LayerSpec(attention, experts, attention_post_norm=True, ffn_post_norm=True, pre_norms=False)
