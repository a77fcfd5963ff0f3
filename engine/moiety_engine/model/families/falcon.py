"""Falcon-H1: each layer has Mamba-2 beside attention, and multipliers of what is read and written.

A layer on disk is two layers of the spec, which read the same input: Mamba-2 without a feed-forward, and attention with
the layer's feed-forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    read_activation,
    read_attention,
    require,
)
from moiety_engine.model.families.mamba2 import read_mamba2
from moiety_engine.model.recurrent_specs import Mamba2Spec
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec
from moiety_kernels.moe.activation import SILU, Activation

_NUM_SECTIONS = 5  # parts of the input projection of Mamba-2, each with a multiplier


def falcon_h1(config: Config, index: int) -> LayerSpec:
    """Return a layer of the spec: those with even indices are Mamba-2, and the next one is attention beside it."""
    if index % 2 == 0:
        return LayerSpec(_mamba2(config), None)
    return LayerSpec(_attention(config), _feed_forward(config), shares_input=True)


def _attention(config: Config) -> AttentionSpec:
    """Return the attention; it is linear in values, and scores in queries and keys, so factors are multiplied there."""
    inwards, outwards = (float(config[f"attention_{way}_multiplier"]) for way in ("in", "out"))
    bias = bool(config["attention_bias"])
    if bias and (inwards, outwards) != (1.0, 1.0):
        raise UnsupportedModelError(
            f"attention_bias with attention_in_multiplier {inwards} and attention_out_multiplier {outwards} is not "
            "supported in falcon_h1; known: no biases, or both multipliers 1.0"
        )
    attention = read_attention(config, qkv_bias=bias, output_bias=bias, value_scale=inwards * outwards)
    return replace(attention, scale=attention.scale * float(config["key_multiplier"]) * inwards**2)


def _feed_forward(config: Config) -> DenseSpec:
    gates, output = map(float, _multipliers(config, "mlp_multipliers", 2))
    activation = read_activation(config)
    if gates != 1.0 and activation != SILU:
        raise UnsupportedModelError(f"mlp_multipliers {[gates, output]} are supported with hidden_act silu only")
    if config["mlp_bias"] and output != 1.0:
        raise UnsupportedModelError(f"mlp_bias with mlp_multipliers {[gates, output]} is not supported in falcon_h1")
    if gates != 1.0:
        activation = Activation("scaled_silu", alpha=gates)
    return DenseSpec(config["intermediate_size"], bool(config["mlp_bias"]), activation, factor=output)


def _mamba2(config: Config) -> Mamba2Spec:
    inner = first(config, "mamba_d_ssm", default=config["mamba_expand"] * config["hidden_size"])
    layer = read_mamba2(config, inner, "mamba_d_ssm ")
    inwards = float(config["ssm_in_multiplier"])
    known = {"ssm_in_multiplier": 1.0} if layer.bias else {}
    require(config, "falcon_h1", mamba_use_mlp=True, projectors_bias=layer.bias, **known)
    return replace(
        layer,
        norm=_norm(config),
        section_factors=tuple(inwards * one for one in _multipliers(config, "ssm_multipliers", _NUM_SECTIONS)),
        output_factor=float(config["ssm_out_multiplier"]),
    )


def _norm(config: Config) -> Literal["gate_first", "norm_first", "none"]:
    if not config["mamba_rms_norm"]:
        return "none"
    return "norm_first" if config["mamba_norm_before_gate"] else "gate_first"


def _multipliers(config: Config, key: str, count: int) -> list[float]:
    found = first(config, key, default=[1.0] * count)
    if len(found) != count:
        raise ConfigError(f"{key} {found} must have {count} numbers")
    return [float(one) for one in found]


def falcon_h1_features(config: Config) -> Features:
    """Return the two layers of the spec that each layer on disk is, and the multipliers of embeddings and logits."""
    return {
        "block_starts": tuple(index // 2 for index in range(2 * config["num_hidden_layers"])),
        "embedding_multiplier": float(config["embedding_multiplier"]),
        "logits_multiplier": float(config["lm_head_multiplier"]),
    }
