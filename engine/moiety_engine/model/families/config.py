"""What the families' config.json files have in common: keys under several names, rotary parameters, heads, routing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.spec import (
    AttentionSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from moiety_kernels.checks import KernelInputError
from moiety_kernels.moe.activation import GELU_TANH, SILU, Activation
from moiety_kernels.route.spec import RoutingSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

Config = dict[str, Any]
Features = dict[str, Any]  # fields of a ModelSpec that a family does not have from the usual keys

ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}


def first(config: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """The first of `keys` that is present and not null."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def need(config: Mapping[str, Any], *keys: str) -> Any:
    """Like `first`, but raises KeyError naming the first key."""
    value = first(config, *keys)
    if value is None:
        raise KeyError(keys[0])
    return value


def read_rope(config: Config, head_dim: int) -> RopeSpec:
    parameters = first(config, "rope_parameters", "rope_scaling", default={})
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModelError("rotary parameters by layer type are not supported")
    theta = float(first(parameters, "rope_theta", default=first(config, "rope_theta", default=10_000.0)))
    partial = first(parameters, "partial_rotary_factor", default=first(config, "partial_rotary_factor", default=1.0))
    return RopeSpec(theta, int(head_dim * partial), _rope_scaling(config, parameters))


def _rope_scaling(config: Config, parameters: Mapping[str, Any]) -> RopeScaling | None:
    kind = first(parameters, "rope_type", "type", default="default")
    original = first(parameters, "original_max_position_embeddings", default=config["max_position_embeddings"])
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(float(parameters["factor"]))
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        return Llama3Scaling(float(parameters["factor"]), low, high, original)
    if kind == "yarn":
        factor = float(first(parameters, "factor", default=config["max_position_embeddings"] / original))
        return YarnScaling(
            factor=factor,
            beta_fast=float(parameters.get("beta_fast") or 32),
            beta_slow=float(parameters.get("beta_slow") or 1),
            original_max_positions=original,
            attention_factor=_yarn_attention_factor(parameters, factor),
            truncate=bool(parameters.get("truncate", True)),
        )
    if kind == "longrope":
        return _longrope(config, parameters)
    raise UnsupportedModelError(f"rope type {kind!r} is not supported; known: default, linear, llama3, yarn, longrope")


def _longrope(config: Config, parameters: Mapping[str, Any]) -> LongRopeScaling:
    """The factors for contexts beyond the original length, if the model takes any: one cache cannot hold positions by
    both, and a prompt must not be answered differently because it grows."""
    longest = config["max_position_embeddings"]
    original = first({**config, **parameters}, "original_max_position_embeddings", default=longest)
    kind = "long" if longest > original else "short"
    factor = float(first(parameters, "factor", default=longest / original))
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    magnitude = first(parameters, f"{kind}_mscale", "attention_factor", default=usual)
    return LongRopeScaling(tuple(map(float, parameters[f"{kind}_factor"])), float(magnitude))


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)


def read_activation(config: Config) -> Activation:
    name = first(config, "hidden_act", "hidden_activation", default="silu")
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def read_attention(config: Config, *, default_head_dim: int | None = None, **features: Any) -> AttentionSpec:
    """The attention; `features` override what follows from the heads, such as `scale`."""
    heads = config["num_attention_heads"]
    head_dim = first(config, "head_dim", default=default_head_dim or config["hidden_size"] // heads)
    kv_heads = first(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    usual = {"rope": read_rope(config, head_dim), "scale": head_dim**-0.5}
    return AttentionSpec(heads, kv_heads, head_dim, **(usual | features))


def read_routing(config: Config, *, renormalize: bool, **features: Any) -> RoutingSpec:
    experts = need(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    top_k = need(config, "num_experts_per_tok", "moe_k")
    if not 0 < top_k <= experts:
        raise ConfigError(f"num_experts_per_tok {top_k} must be between 1 and num_experts {experts}")
    try:
        return RoutingSpec(experts, top_k, renormalize, **features)
    except KernelInputError as exc:
        raise ConfigError(f"config.json asks for a routing that cannot be: {exc}") from exc
