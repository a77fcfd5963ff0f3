"""Gemma 3: the text models, and the text part of the multimodal models."""

from __future__ import annotations

from typing import Any

import torch

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    checkpoint_dtype,
    first,
    need,
    read_activation,
    read_attention,
    rope_from,
)
from moiety_engine.model.rope_spec import RopeSpec
from moiety_engine.model.spec import DenseSpec, LayerSpec, NormSpec

# "sliding_attention" and "full_attention" layers have different rotary frequencies
THETA_KEYS = {"sliding_attention": "rope_local_base_freq", "full_attention": "rope_theta"}
NOT_TEXT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def gemma3_text_config(config: Config) -> Config:
    """Return the text model's configuration, with the keys that apply to the whole model."""
    shared = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "compression_config")
    around = {key: config[key] for key in shared if key in config}
    text: Config = config.get("text_config", config)
    return around | text


def gemma3(config: Config, index: int) -> LayerSpec:
    kinds = config.get("layer_types")
    if kinds is None:
        local = (index + 1) % config["sliding_window_pattern"]
        kind = "sliding_attention" if local else "full_attention"
    else:
        kind = kinds[index]
    bias = bool(config["attention_bias"])
    attention = read_attention(
        config,
        rope=_rope(config, kind),
        scale=config["query_pre_attn_scalar"] ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        window=config["sliding_window"] if kind == "sliding_attention" else None,
    )
    return LayerSpec(
        attention,
        DenseSpec(config["intermediate_size"], activation=read_activation(config, "hidden_activation")),
        attention_post_norm=True,
        ffn_post_norm=True,
    )


def _rope(config: Config, kind: str) -> RopeSpec:
    by_kind = config.get("rope_parameters")
    if by_kind is not None and kind in by_kind:
        parameters: dict[str, Any] = by_kind[kind]
    else:  # as in the first releases: scaling applies to full-attention layers only
        parameters = first(config, "rope_scaling", default={}) if kind == "full_attention" else {}
    return rope_from(config, {"rope_theta": need(config, THETA_KEYS[kind])} | parameters, config["head_dim"])


def gemma3_features(config: Config) -> Features:
    """Return the features of Gemma 3: scaled embeddings, norm weights stored minus one, soft-capped logits."""
    for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise UnsupportedModelError(f"{key} is not supported, which no released model of this family has")
    scale = torch.tensor(config["hidden_size"] ** 0.5)
    if checkpoint_dtype(config) == "bfloat16":
        scale = scale.bfloat16()  # rounded as in training
    return {
        "norm": NormSpec(float(config["rms_norm_eps"]), weight_offset=1.0),
        "embedding_multiplier": scale.item(),
        "logit_softcap": config.get("final_logit_softcapping"),
        "ignored_prefixes": NOT_TEXT,
    }
