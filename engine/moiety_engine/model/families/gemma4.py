"""Gemma 4, its text models without embeddings for each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    checkpoint_dtype,
    first,
    is_sliding_layer,
    need,
    read_activation,
    read_attention,
    read_routing,
    read_shared,
    rope_of_kind,
)
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, MoeSpec

if TYPE_CHECKING:
    from moiety_kernels.moe.activation import Activation

_FULL_EVERY = 6  # every sixth layer and the last have full attention, unless layer_types says otherwise
_FULL_HEAD_DIM = 512  # of layers with full attention, unless global_head_dim says otherwise
_UNSUPPORTED = ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_bidirectional_attention")


def gemma4_text(config: Config, index: int) -> LayerSpec:
    """Return a layer; those with full attention have wider heads, whose values are the keys before their norm."""
    for key in _UNSUPPORTED:
        if config[key] not in (0, None, "vision"):
            raise UnsupportedModelError(
                f"{key} {config[key]!r} is not supported in gemma4_text; the models without it, such as 26B-A4B, are"
            )
    activation, width = read_activation(config, "hidden_activation"), config["intermediate_size"]
    ffn = _experts(config, activation) if config["enable_moe_block"] else DenseSpec(width, activation=activation)
    return LayerSpec(_attention(config, index), ffn, attention_post_norm=True, ffn_post_norm=True, scaled=True)


def _attention(config: Config, index: int) -> AttentionSpec:
    usual = bool((index + 1) % _FULL_EVERY) and index + 1 < config["num_hidden_layers"]
    slides = is_sliding_layer(config, index, otherwise=usual)
    kind, bias = "sliding_attention" if slides else "full_attention", bool(config["attention_bias"])
    keys_are_values = bool(config["attention_k_eq_v"]) and not slides
    of_layer = config | ({} if slides else _of_full_attention(config, index))
    return read_attention(
        of_layer,
        rope=rope_of_kind(config, kind, of_layer["head_dim"]),
        scale=1.0,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        value_norm=True,
        keys_are_values=keys_are_values,
        window=config["sliding_window"] if slides else None,
    )


def _of_full_attention(config: Config, index: int) -> Config:
    """Return the settings of heads in a layer with full attention: as published, or as transformers writes them."""
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        own: Config = by_layer.get(str(index), {})
        return {key: own[key] for key in ("head_dim", "num_key_value_heads") if key in own}
    width, heads = first(config, "global_head_dim", default=_FULL_HEAD_DIM), config.get("num_global_key_value_heads")
    heads = heads if config["attention_k_eq_v"] else None
    return {"head_dim": width} | ({} if heads is None else {"num_key_value_heads": heads})


def _experts(config: Config, activation: Activation) -> MoeSpec:
    routing = read_routing(config, "num_experts", top_k_key="top_k_experts", renormalize=True)
    shared = read_shared(config["intermediate_size"], activation)
    return MoeSpec(need(config, "moe_intermediate_size"), routing, activation, normed=True, shared=shared)


def gemma4_features(config: Config) -> Features:
    """Return the features of Gemma 4: scaled embeddings and soft-capped logits."""
    scale = torch.tensor(config["hidden_size"] ** 0.5)
    if checkpoint_dtype(config) == "bfloat16":
        scale = scale.bfloat16()  # rounded as in training
    return {"embedding_multiplier": scale.item(), "logit_softcap": config["final_logit_softcapping"]}
