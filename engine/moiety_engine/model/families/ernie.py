"""ERNIE 4.5 text MoE models."""

from __future__ import annotations

from dataclasses import replace

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    read_activation,
    read_attention,
    read_routing,
)
from moiety_engine.model.spec import DenseSpec, LayerSpec, MoeSpec, SharedSpec


def ernie4_5_moe(config: Config, index: int) -> LayerSpec:
    bias, activation = bool(config["use_bias"]), read_activation(config)
    attention = read_attention(config, qkv_bias=bias, output_bias=bias)
    if attention.rope.rotary_width != attention.head_dim:
        raise UnsupportedModelError("partial_rotary_factor is not supported in ernie4_5_moe, where no model has it")
    attention = replace(attention, rope=replace(attention.rope, interleaved=True))
    if not _is_mixture(config, index):
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], bias, activation))
    least = float(config["moe_norm_min"])
    width, num_shared = config["moe_intermediate_size"], config["moe_num_shared_experts"]
    mixture = MoeSpec(
        width,
        read_routing(config, "moe_num_experts", top_k_key="moe_k", renormalize=True, least_sum=least),
        activation,
        selection_bias=True,
        exact_router=True,
        shared=SharedSpec(DenseSpec(num_shared * width, bias, activation)) if num_shared else None,
    )
    return LayerSpec(attention, mixture)


def _is_mixture(config: Config, index: int) -> bool:
    last = config["moe_layer_end_index"]
    last = config["num_hidden_layers"] - 1 if last == -1 else last
    within = config["moe_layer_start_index"] <= index <= last
    return bool(within and (index + 1) % config["moe_layer_interval"] == 0)


def ernie_features(_config: Config) -> Features:
    """Return the prefix of the MTP layers, which are not loaded."""
    return {"ignored_prefixes": ("model.mtp_",)}
