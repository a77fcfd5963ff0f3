"""Kimi Linear: Kimi Delta Attention, and in every fourth layer latent attention without positions."""

from __future__ import annotations

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    is_dense_layer,
    read_activation,
    read_sigmoid_experts,
    require,
)
from moiety_engine.model.families.deepseek import plain_latent_attention
from moiety_engine.model.recurrent_specs import KimiDeltaSpec
from moiety_engine.model.rope_spec import without_rotation
from moiety_engine.model.spec import DenseSpec, LayerSpec, MoeSpec
from moiety_kernels.moe.activation import SILU

_FULL_INTERVAL = 4
# Keys of `linear_attn_config`, which published files have, and the keys that transformers has instead.
_OF_DELTA = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def kimi_linear(config: Config, index: int) -> LayerSpec:
    require(config, "kimi_linear", attention_bias=False, mla_use_nope=True, moe_layer_freq=1)
    require(config, "kimi_linear", moe_router_activation_func="sigmoid")
    activation = read_activation(config)
    if is_dense_layer(config, index, num_dense=config.get("first_k_dense_replace", 1)):
        ffn: DenseSpec | MoeSpec = DenseSpec(config["intermediate_size"], activation=activation)
    else:
        ffn = read_sigmoid_experts(config, "num_local_experts")
    if _is_linear(config, index):
        return LayerSpec(_delta(config), ffn)
    unrotated = without_rotation(config["qk_rope_head_dim"])
    return LayerSpec(plain_latent_attention(config, unrotated), ffn)


def kimi_linear_features(config: Config) -> Features:
    """Return the prefixes of MTP layers, which decoding ignores."""
    last, further = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    return {"ignored_prefixes": tuple(f"model.layers.{last + index}." for index in range(further))}


def _is_linear(config: Config, index: int) -> bool:
    linear = config.get("linear_attn_config") or {}
    kinds = config.get("layer_types")
    if kinds is not None:
        if kinds[index] not in ("linear_attention", "full_attention"):
            raise UnsupportedModelError(f"layer type {kinds[index]!r} is not supported in kimi_linear")
        return bool(kinds[index] == "linear_attention")
    if "full_attn_layers" in linear and "kda_layers" in linear:  # counted from 1
        is_linear, is_full = (index + 1 in linear[key] for key in ("kda_layers", "full_attn_layers"))
        if is_linear == is_full:
            raise UnsupportedModelError(f"linear_attn_config must name layer {index + 1} in exactly one of its lists")
        return is_linear
    return index == 0 or index % _FULL_INTERVAL != 0


def _delta(config: Config) -> KimiDeltaSpec:
    linear: Config = config.get("linear_attn_config") or {}
    if read_activation(config) != SILU:
        raise UnsupportedModelError("Kimi Delta Attention is supported with hidden_act silu only")
    heads, width, taps = (linear[key] if key in linear else config[other] for key, other in _OF_DELTA.items())
    return KimiDeltaSpec(heads, width, taps, norm_eps=float(config["rms_norm_eps"]))
