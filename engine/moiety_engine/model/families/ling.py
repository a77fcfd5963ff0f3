"""Ling 2.0 and Ring 2.0 (BailingMoeV2), whose classes come with the checkpoints, and Ling 3."""

from __future__ import annotations

from dataclasses import replace

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    is_dense_layer,
    read_activation,
    read_attention,
    read_rope,
    read_sigmoid_experts,
    require,
    rope_parameters,
)
from moiety_engine.model.families.deepseek import read_latent_attention
from moiety_engine.model.recurrent_specs import KimiDeltaSpec
from moiety_engine.model.rope_spec import RopeSpec
from moiety_engine.model.spec import DenseSpec, LayerSpec, MoeSpec
from moiety_kernels.moe.activation import SILU

_HEAD_DIM = 128  # of Ling 3's recurrent layers, if config.json does not state it


def bailing_moe(config: Config, index: int) -> LayerSpec:
    require(config, "bailing_moe", score_function="sigmoid", moe_router_enable_expert_bias=True, use_rmsnorm=True)
    require(config, "bailing_moe", norm_head=False, norm_softmax=False)
    attention = read_attention(
        config,
        rope=_rope(config),
        qkv_bias=bool(config["use_qkv_bias"]),
        output_bias=bool(config["use_bias"]),
        qk_norm="head" if config["use_qk_norm"] else "none",
    )
    if index < config["first_k_dense_replace"]:
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=read_activation(config)))
    shared_keys = "num_shared_experts", "moe_shared_expert_intermediate_size"
    return LayerSpec(attention, read_sigmoid_experts(config, "num_experts", *shared_keys))


def _rope(config: Config) -> RopeSpec:
    """Return the rotary embedding, whose part of a head is stated as a share or as a width, `rotary_dim`."""
    head_dim = first(config, "head_dim", default=config["hidden_size"] // config["num_attention_heads"])
    partial = first(rope_parameters(config), "partial_rotary_factor") or first(config, "partial_rotary_factor")
    rotary_width = config.get("rotary_dim")
    if partial is None and rotary_width:
        return read_rope(config | {"partial_rotary_factor": rotary_width / head_dim}, head_dim)
    return read_rope(config, head_dim)


def bailing_hybrid(config: Config, index: int) -> LayerSpec:
    """Return a layer of Ling 3: Kimi Delta Attention, and latent attention at the end of each group of layers."""
    kinds = config.get("layer_types")
    if kinds is None:
        linear = (index + 1) % config["layer_group_size"] != 0
    elif kinds[index] in ("linear_attention", "full_attention"):
        linear = kinds[index] == "linear_attention"
    else:
        raise UnsupportedModelError(f"layer type {kinds[index]!r} is not supported in bailing_hybrid")
    if is_dense_layer(config, index, num_dense=config["first_k_dense_replace"]):
        ffn: DenseSpec | MoeSpec = DenseSpec(config["intermediate_size"], activation=read_activation(config))
    else:
        ffn = read_sigmoid_experts(config, "num_local_experts")
    if linear:
        return LayerSpec(_delta(config), ffn)
    return LayerSpec(replace(read_latent_attention(config, interleaved=True), head_gates=True), ffn)


def _delta(config: Config) -> KimiDeltaSpec:
    """Return Kimi Delta Attention; the files of transformers have its sizes under keys of their own."""
    if read_activation(config) != SILU:
        raise UnsupportedModelError("Kimi Delta Attention is supported with hidden_act silu only")
    return KimiDeltaSpec(
        num_heads=first(config, "linear_num_heads", "num_attention_heads"),
        head_width=first(config, "linear_head_dim", "head_dim", default=_HEAD_DIM),
        conv_taps=first(config, "linear_conv_kernel_dim", "short_conv_kernel_size"),
        norm_eps=float(config["rms_norm_eps"]),
        low_rank=False,
        lowest_decay=float(config["kda_lower_bound"]) if config["kda_safe_gate"] else None,
    )


def bailing_hybrid_features(config: Config) -> Features:
    """Return the prefixes of MTP layers, which decoding ignores."""
    last = config["num_hidden_layers"]
    return {"ignored_prefixes": tuple(f"model.layers.{last + index}." for index in range(config["num_mtp_layers"]))}
