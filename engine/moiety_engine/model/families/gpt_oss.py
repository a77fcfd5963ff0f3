"""Reader of gpt-oss configurations."""

from __future__ import annotations

from moiety_engine.model.families.config import Config, read_attention, read_routing, require
from moiety_engine.model.spec import LayerSpec, MoeSpec
from moiety_kernels.moe.activation import Activation


def gpt_oss(config: Config, index: int) -> LayerSpec:
    kinds = config.get("layer_types")
    local = index % 2 == 0 if kinds is None else kinds[index] == "sliding_attention"
    bias = bool(config["attention_bias"])
    attention = read_attention(
        config, qkv_bias=bias, output_bias=bias, sinks=True, window=config["sliding_window"] if local else None
    )
    require(config, "gpt_oss", hidden_act="silu")  # the base of its clipped activation
    limit, alpha = float(config["swiglu_limit"]), float(config["swiglu_alpha"])
    mixture = MoeSpec(
        config["intermediate_size"],
        read_routing(config, "num_local_experts", renormalize=False, scoring="softmax_chosen"),
        Activation("clipped", limit, alpha),
        bias=True,
        router_bias=True,
    )
    return LayerSpec(attention, mixture)
