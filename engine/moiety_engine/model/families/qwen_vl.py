"""Qwen3-VL with experts: a Qwen3 MoE decoder with M-RoPE, and a vision encoder."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    read_activation,
    read_attention,
    read_rope,
    read_routing,
    require,
    rope_parameters,
)
from moiety_engine.model.families.defaults import VISION_DEFAULTS
from moiety_engine.model.rope_spec import RopeSpec
from moiety_engine.model.spec import DenseSpec, LayerSpec, MoeSpec
from moiety_engine.model.vision_spec import VisionSpec

_OF_THE_WHOLE = ("dtype", "torch_dtype", "quantization_config", "compression_config", "tie_word_embeddings")
_TOKENS = ("image_token_id", "vision_start_token_id", "vision_end_token_id")


def qwen3_vl_moe_text_config(config: Config) -> Config:
    """Return the text model's configuration, with the keys of the whole model and of its encoder.

    Only the whole model's `tie_word_embeddings` counts, as in transformers.
    """
    whole = {key: config[key] for key in (*_OF_THE_WHOLE, *_TOKENS) if key in config}
    text = {key: value for key, value in (config.get("text_config") or {}).items() if key != "tie_word_embeddings"}
    return text | whole | {"vision_config": config.get("vision_config") or {}}


def qwen3_vl_moe(config: Config, index: int) -> LayerSpec:
    bias = bool(config["attention_bias"])
    attention = read_attention(config, rope=_rope(config), qkv_bias=bias, output_bias=bias, qk_norm="head")
    activation = read_activation(config)
    if index in (config.get("mlp_only_layers") or ()) or (index + 1) % config["decoder_sparse_step"] != 0:
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=activation))
    routing = read_routing(config, "num_experts", renormalize=True)
    return LayerSpec(attention, MoeSpec(config["moe_intermediate_size"], routing, activation))


def _rope(config: Config) -> RopeSpec:
    parameters = rope_parameters(config)
    if parameters.get("mrope_interleaved") is False:
        raise UnsupportedModelError("mrope_interleaved false is not supported in qwen3_vl_moe; known: true")
    section = first(parameters, "mrope_section", default=[24, 20, 20])
    if len(section) != 3:
        raise ConfigError(f"mrope_section {section} must have 3 numbers: of temporal, vertical and horizontal pairs")
    head_dim = first(config, "head_dim", default=config["hidden_size"] // config["num_attention_heads"])
    return replace(read_rope(config, head_dim), axes=(int(section[0]), int(section[1]), int(section[2])))


def qwen3_vl_moe_features(config: Config) -> Features:
    """Return the vision encoder. Raises ConfigError if its parts do not fit together."""
    vision: dict[str, Any] = VISION_DEFAULTS | config["vision_config"]
    require(vision, "qwen3_vl_moe", hidden_act="gelu_pytorch_tanh", out_hidden_size=config["hidden_size"])
    side = math.isqrt(vision["num_position_embeddings"])
    if side * side != vision["num_position_embeddings"]:
        raise ConfigError(f"num_position_embeddings {vision['num_position_embeddings']} is not a square")
    if vision["hidden_size"] % (4 * vision["num_heads"]):
        raise ConfigError(
            f"the encoder's hidden_size {vision['hidden_size']} is not a multiple of 4 times num_heads "
            f"{vision['num_heads']}"
        )
    deepstack = tuple(vision["deepstack_visual_indexes"])
    if len(set(deepstack)) != len(deepstack) or any(not 0 <= layer < vision["depth"] for layer in deepstack):
        raise ConfigError(f"deepstack_visual_indexes {deepstack} must be distinct layers of {vision['depth']}")
    if len(deepstack) > config["num_hidden_layers"]:
        raise ConfigError(f"{len(deepstack)} deepstack_visual_indexes need as many num_hidden_layers")
    rope = vision.get("rope_parameters") or {}
    return {
        "vision": VisionSpec(
            num_layers=vision["depth"],
            hidden_size=vision["hidden_size"],
            ffn_width=vision["intermediate_size"],
            num_heads=vision["num_heads"],
            num_channels=vision["in_channels"],
            patch_size=vision["patch_size"],
            temporal_patch_size=vision["temporal_patch_size"],
            merge_size=vision["spatial_merge_size"],
            num_side_positions=side,
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
            deepstack_layers=deepstack,
            image_token_id=config["image_token_id"],
            vision_start_token_id=config["vision_start_token_id"],
            vision_end_token_id=config["vision_end_token_id"],
        )
    }
