"""Hy3 (Hunyuan 3)."""

from __future__ import annotations

from moiety_engine.model.families.config import (
    Config,
    is_dense_layer,
    read_activation,
    read_attention,
    read_routing,
    read_shared,
    require,
)
from moiety_engine.model.spec import DenseSpec, LayerSpec, MoeSpec


def hy_v3(config: Config, index: int) -> LayerSpec:
    require(config, "hy_v3", qk_norm=True, route_norm=True, moe_router_use_sigmoid=True)
    bias, mlp_bias = bool(config["attention_bias"]), bool(config["mlp_bias"])
    attention = read_attention(config, qkv_bias=bias, output_bias=bias, qk_norm="head")
    activation = read_activation(config)
    if is_dense_layer(config, index):
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], mlp_bias, activation))
    scale = float(config["router_scaling_factor"])
    routing = read_routing(config, "num_experts", renormalize=True, scoring="sigmoid", scale=scale)
    width = config["moe_intermediate_size"]
    shared = read_shared(config["num_shared_experts"] * width, activation, bias=mlp_bias)
    return LayerSpec(
        attention, MoeSpec(width, routing, activation, selection_bias=True, exact_router=True, shared=shared)
    )
