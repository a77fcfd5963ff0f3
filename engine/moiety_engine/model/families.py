"""Reading a Hugging Face config.json into a ModelSpec, family by family. Knows no tensor.

Takes the keys of the original releases (`rope_theta`, `rope_scaling`, `num_experts`, `torch_dtype`) and those that
transformers 5 writes (`rope_parameters`, `num_local_experts`, `dtype`).
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.spec import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    MoeSpec,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from moiety_kernels.route.spec import RoutingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

Config = dict[str, Any]


def read_spec(folder: Path) -> ModelSpec:
    """The spec of the checkpoint in `folder`; raises ConfigError or UnsupportedModelError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold one JSON object")
    return spec_from_config(config)


def spec_from_config(config: Config) -> ModelSpec:
    """The spec that a parsed config.json describes; raises ConfigError or UnsupportedModelError."""
    family = config.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(f"model family {family!r} is not supported; the known families are: {known}")
    if config.get("quantization_config"):
        raise UnsupportedModelError("quantized checkpoints are not supported; use the unquantized one")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
    try:
        return ModelSpec(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_context_tokens=config["max_position_embeddings"],
            checkpoint_dtype=str(_first(config, "dtype", "torch_dtype", default="float32")).removeprefix("torch."),
            layers=tuple(FAMILIES[family](config, index) for index in range(config["num_hidden_layers"])),
        )
    except KeyError as exc:
        raise ConfigError(f"config.json of a {family} model lacks the key {exc.args[0]!r}") from exc


def _first(config: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """The first of `keys` that is present and not null."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _need(config: Mapping[str, Any], *keys: str) -> Any:
    """Like _first, but raises KeyError naming the first key."""
    value = _first(config, *keys)
    if value is None:
        raise KeyError(keys[0])
    return value


def _rope(config: Config, head_dim: int) -> RopeSpec:
    parameters = _first(config, "rope_parameters", "rope_scaling", default={})
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModelError("rotary parameters by layer type are not supported")
    theta = float(_first(parameters, "rope_theta", default=_first(config, "rope_theta", default=10_000.0)))
    partial = _first(parameters, "partial_rotary_factor", default=_first(config, "partial_rotary_factor", default=1.0))
    return RopeSpec(theta, int(head_dim * partial), _rope_scaling(config, parameters))


def _rope_scaling(config: Config, parameters: Mapping[str, Any]) -> RopeScaling | None:
    kind = _first(parameters, "rope_type", "type", default="default")
    original = _first(parameters, "original_max_position_embeddings", default=config["max_position_embeddings"])
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(float(parameters["factor"]))
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        return Llama3Scaling(float(parameters["factor"]), low, high, original)
    if kind == "yarn":
        factor = float(_first(parameters, "factor", default=config["max_position_embeddings"] / original))
        return YarnScaling(
            factor=factor,
            beta_fast=float(parameters.get("beta_fast") or 32),
            beta_slow=float(parameters.get("beta_slow") or 1),
            original_max_positions=original,
            attention_factor=_yarn_attention_factor(parameters, factor),
            truncate=bool(parameters.get("truncate", True)),
        )
    raise UnsupportedModelError(f"rope type {kind!r} is not supported; known: default, linear, llama3, yarn")


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)


def _attention(config: Config, *, default_head_dim: int | None = None, **features: Any) -> AttentionSpec:
    heads = config["num_attention_heads"]
    head_dim = _first(config, "head_dim", default=default_head_dim or config["hidden_size"] // heads)
    kv_heads = _first(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return AttentionSpec(heads, kv_heads, head_dim, _rope(config, head_dim), **features)


def _routing(config: Config, *, renormalize: bool) -> RoutingSpec:
    experts = _need(config, "num_experts", "num_local_experts")
    top_k = config["num_experts_per_tok"]
    if not 0 < top_k <= experts:
        raise ConfigError(f"num_experts_per_tok {top_k} must be between 1 and num_experts {experts}")
    return RoutingSpec(experts, top_k, renormalize)


def _qwen_window(config: Config, index: int) -> int | None:
    if not config.get("use_sliding_window"):
        return None
    kinds = config.get("layer_types")
    if kinds is not None:
        return config["sliding_window"] if kinds[index] == "sliding_attention" else None
    dense = config["model_type"] == "qwen3"
    return None if dense and index < config.get("max_window_layers", 28) else config["sliding_window"]


def _qwen3_attention(config: Config, index: int) -> AttentionSpec:
    bias = bool(config.get("attention_bias", False))
    default_head_dim = 128 if config["model_type"] == "qwen3" else None  # as the family's own config class has it
    return _attention(
        config,
        default_head_dim=default_head_dim,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        window=_qwen_window(config, index),
    )


def _qwen3(config: Config, index: int) -> LayerSpec:
    return LayerSpec(_qwen3_attention(config, index), DenseSpec(config["intermediate_size"]))


def _qwen3_moe(config: Config, index: int) -> LayerSpec:
    dense = index in (config.get("mlp_only_layers") or ()) or (index + 1) % config.get("decoder_sparse_step", 1)
    if dense:
        return _qwen3(config, index)
    routing = _routing(config, renormalize=bool(config.get("norm_topk_prob", False)))
    return LayerSpec(_qwen3_attention(config, index), MoeSpec(config["moe_intermediate_size"], routing))


def _mixtral(config: Config, _index: int) -> LayerSpec:
    attention = _attention(config, window=config.get("sliding_window"))
    return LayerSpec(attention, MoeSpec(config["intermediate_size"], _routing(config, renormalize=True)))


def _olmoe(config: Config, _index: int) -> LayerSpec:
    bias = bool(config.get("attention_bias", False))
    attention = _attention(config, qkv_bias=bias, output_bias=bias, qk_norm="full", clip=config.get("clip_qkv"))
    routing = _routing(config, renormalize=bool(config.get("norm_topk_prob", False)))
    return LayerSpec(attention, MoeSpec(config["intermediate_size"], routing))


def _llama(config: Config, _index: int) -> LayerSpec:
    bias = bool(config.get("attention_bias", False))
    attention = _attention(config, qkv_bias=bias, output_bias=bias)
    return LayerSpec(attention, DenseSpec(config["intermediate_size"], bool(config.get("mlp_bias", False))))


FAMILIES: dict[str, Callable[[Config, int], LayerSpec]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
