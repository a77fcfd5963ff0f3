"""Qwen2, Qwen3 and their mixtures."""

from __future__ import annotations

from moiety_engine.model.families.config import Config, read_activation, read_attention, read_routing
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, MoeSpec, SharedSpec


def _window(config: Config, index: int) -> int | None:
    if not config.get("use_sliding_window"):
        return None
    kinds = config.get("layer_types")
    if kinds is not None:
        return config["sliding_window"] if kinds[index] == "sliding_attention" else None
    if config["model_type"] == "qwen2_moe":
        return None if index % 2 or index >= config.get("max_window_layers", 28) else config["sliding_window"]
    dense = config["model_type"] in ("qwen2", "qwen3")
    return None if dense and index < config.get("max_window_layers", 28) else config["sliding_window"]


def _attention(config: Config, index: int) -> AttentionSpec:
    bias = bool(config.get("attention_bias", False))
    default_head_dim = 128 if config["model_type"] == "qwen3" else None  # as the family's own config class has it
    return read_attention(
        config,
        default_head_dim=default_head_dim,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        window=_window(config, index),
    )


def _is_dense(config: Config, index: int) -> bool:
    step = config.get("decoder_sparse_step", 1)
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
    routing = read_routing(config, renormalize=bool(config.get("norm_topk_prob", False)))
    return LayerSpec(
        _attention(config, index), MoeSpec(config["moe_intermediate_size"], routing, read_activation(config))
    )


def qwen2_moe(config: Config, index: int) -> LayerSpec:
    bias, window = bool(config.get("qkv_bias", True)), _window(config, index)
    attention, activation = read_attention(config, qkv_bias=bias, window=window), read_activation(config)
    if _is_dense(config, index):
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=activation))
    routing = read_routing(config, renormalize=bool(config.get("norm_topk_prob", False)))
    shared = SharedSpec(DenseSpec(config["shared_expert_intermediate_size"], activation=activation), gated=True)
    return LayerSpec(attention, MoeSpec(config["moe_intermediate_size"], routing, activation, shared=shared))
