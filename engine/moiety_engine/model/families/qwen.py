"""Qwen2, Qwen3 and their MoE models."""

from __future__ import annotations

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import Config, read_activation, read_attention, read_routing
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, MoeSpec, SharedSpec


def _window(config: Config, index: int) -> int | None:
    """Return the number of positions that the layer attends to, or None for all.

    Raises UnsupportedModelError if `layer_types` configures a window that `use_sliding_window` turns off: no
    interpretation agrees with transformers, whose window then has no positions.
    """
    by_layer = config["model_type"] != "qwen3_moe"  # its class has no layer_types: all layers are alike
    kinds = config.get("layer_types") if by_layer else None
    used = bool(config["use_sliding_window"])
    if kinds is not None:
        slides = kinds[index] == "sliding_attention"
        if slides and not used:
            raise UnsupportedModelError(
                f"config.json sets sliding_attention for layer {index} in layer_types, but "
                f"use_sliding_window is {config['use_sliding_window']!r} (false is the default): set "
                "use_sliding_window to true if the model was trained with the window, or set "
                "full_attention in layer_types"
            )
    elif not by_layer:
        slides = used
    elif config["model_type"] == "qwen2_moe":
        slides = used and index % 2 == 0 and index < config["max_window_layers"]
    else:
        slides = used and index >= config["max_window_layers"]
    return config["sliding_window"] if slides else None


def _attention(config: Config, index: int) -> AttentionSpec:
    bias = bool(config["attention_bias"])
    return read_attention(config, qkv_bias=bias, output_bias=bias, qk_norm="head", window=_window(config, index))


def _is_dense(config: Config, index: int) -> bool:
    step = config["decoder_sparse_step"]
    return index in (config.get("mlp_only_layers") or ()) or (index + 1) % step != 0


def qwen2(config: Config, index: int) -> LayerSpec:
    attention = read_attention(config, qkv_bias=True, window=_window(config, index))
    return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=read_activation(config)))


def qwen3(config: Config, index: int) -> LayerSpec:
    return LayerSpec(
        _attention(config, index), DenseSpec(config["intermediate_size"], activation=read_activation(config))
    )


def qwen3_moe(config: Config, index: int) -> LayerSpec:
    if _is_dense(config, index):
        return qwen3(config, index)
    routing = read_routing(config, "num_experts", renormalize=bool(config["norm_topk_prob"]))
    return LayerSpec(
        _attention(config, index), MoeSpec(config["moe_intermediate_size"], routing, read_activation(config))
    )


def qwen2_moe(config: Config, index: int) -> LayerSpec:
    bias, window = bool(config["qkv_bias"]), _window(config, index)
    attention, activation = read_attention(config, qkv_bias=bias, window=window), read_activation(config)
    if _is_dense(config, index):
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=activation))
    routing = read_routing(config, "num_experts", renormalize=bool(config["norm_topk_prob"]))
    shared = SharedSpec(DenseSpec(config["shared_expert_intermediate_size"], activation=activation), gated=True)
    return LayerSpec(attention, MoeSpec(config["moe_intermediate_size"], routing, activation, shared=shared))
