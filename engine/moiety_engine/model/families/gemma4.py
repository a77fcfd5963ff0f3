"""Gemma 4, its text models; E2B and E4B have embeddings for each layer, and layers that share keys and values."""

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
from moiety_engine.model.layer_embedding_spec import LayerEmbeddingSpec
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, MoeSpec
from moiety_kernels.moe.activation import GELU_TANH

if TYPE_CHECKING:
    from moiety_kernels.moe.activation import Activation

_FULL_EVERY = 6  # every sixth layer and the last have full attention, unless layer_types says otherwise
_FULL_HEAD_DIM = 512  # of layers with full attention, unless global_head_dim says otherwise


def gemma4_text(config: Config, index: int) -> LayerSpec:
    """Return a layer; those with full attention have wider heads, whose values are the keys before their norm."""
    if config["use_bidirectional_attention"] not in (None, "vision"):
        raise UnsupportedModelError("use_bidirectional_attention 'all' is not supported in gemma4_text")
    attention = _attention(config, index)
    activation, width = read_activation(config, "hidden_activation"), config["intermediate_size"]
    if config["use_double_wide_mlp"] and attention.kv_layer is not None:
        width *= 2
    ffn = _experts(config, activation) if config["enable_moe_block"] else DenseSpec(width, activation=activation)
    embedded = bool(config["hidden_size_per_layer_input"])
    if embedded and activation != GELU_TANH:
        raise UnsupportedModelError(
            "embeddings of each layer are supported with hidden_activation gelu_pytorch_tanh only"
        )
    return LayerSpec(attention, ffn, attention_post_norm=True, ffn_post_norm=True, scaled=True, embedded=embedded)


def _attention(config: Config, index: int) -> AttentionSpec:
    slides, kv_layer = _slides(config, index), _kv_layer(config, index)
    kind, bias = "sliding_attention" if slides else "full_attention", bool(config["attention_bias"])
    keys_are_values = bool(config["attention_k_eq_v"]) and not slides and kv_layer is None
    of_layer = config | ({} if slides else _of_full_attention(config, index))
    return read_attention(
        of_layer,
        rope=rope_of_kind(config, kind, of_layer["head_dim"]),
        scale=1.0,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        value_norm=kv_layer is None,
        keys_are_values=keys_are_values,
        window=config["sliding_window"] if slides else None,
        kv_layer=kv_layer,
    )


def _slides(config: Config, index: int) -> bool:
    usual = bool((index + 1) % _FULL_EVERY)
    return index + 1 < config["num_hidden_layers"] and is_sliding_layer(config, index, otherwise=usual)


def _kv_layer(config: Config, index: int) -> int | None:
    """Return the layer whose keys and values the layer reads: the last of its kind that has its own; None: itself."""
    first_shared = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    if index < first_shared:
        return None
    slides = _slides(config, index)
    of_kind = [layer for layer in range(first_shared) if _slides(config, layer) == slides]
    if not of_kind:
        raise UnsupportedModelError(
            f"num_kv_shared_layers {config['num_kv_shared_layers']} leaves layer {index} no earlier layer of its kind "
            "whose keys and values it could read"
        )
    return of_kind[-1]


def _of_full_attention(config: Config, index: int) -> Config:
    """Return the settings of heads in a layer with full attention: as published, or as transformers writes them."""
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        own: Config = next(
            (one for layer, one in by_layer.items() if int(layer) == index), {}
        )  # transformers writes "05"
        return {key: own[key] for key in ("head_dim", "num_key_value_heads") if key in own}
    width, heads = first(config, "global_head_dim", default=_FULL_HEAD_DIM), config.get("num_global_key_value_heads")
    heads = heads if config["attention_k_eq_v"] else None
    return {"head_dim": width} | ({} if heads is None else {"num_key_value_heads": heads})


def _experts(config: Config, activation: Activation) -> MoeSpec:
    routing = read_routing(config, "num_experts", top_k_key="top_k_experts", renormalize=True)
    shared = read_shared(config["intermediate_size"], activation)
    return MoeSpec(need(config, "moe_intermediate_size"), routing, activation, normed=True, shared=shared)


def gemma4_features(config: Config) -> Features:
    """Return the features of Gemma 4: scaled embeddings, embeddings of each layer, and soft-capped logits."""
    width, embeddings = config["hidden_size_per_layer_input"], None
    if width:
        embeddings = LayerEmbeddingSpec(config["vocab_size_per_layer_input"], width, _root(config, width))
    return {
        "embedding_multiplier": _root(config, config["hidden_size"]),
        "logit_softcap": config["final_logit_softcapping"],
        "layer_embeddings": embeddings,
    }


def _root(config: Config, width: int) -> float:
    """Return the factor of embeddings of this width, rounded as in training."""
    root = torch.tensor(width**0.5)
    return float(root.bfloat16() if checkpoint_dtype(config) == "bfloat16" else root)
