"""Common parts of the families' config.json files: alternative keys, rotary parameters, heads, routing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeFactors,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from moiety_engine.model.spec import AttentionSpec, DenseSpec, MoeSpec, SharedSpec
from moiety_kernels.checks import KernelInputError
from moiety_kernels.moe.activation import GELU_TANH, SILU, Activation
from moiety_kernels.route.spec import RoutingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moiety_engine.model.spec import LayerSpec

Config = dict[str, Any]
Features = dict[str, Any]  # fields of a ModelSpec that a family reads in its own way

ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}


def first(config: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """Return the value of the first of `keys` that is present and not null."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def need(config: Mapping[str, Any], *keys: str) -> Any:
    """Return the value like `first`, but raise KeyError with the first key if all are absent."""
    value = first(config, *keys)
    if value is None:
        raise KeyError(keys[0])
    return value


def read_rope(config: Config, head_dim: int, *, interleaved: bool = False) -> RopeSpec:
    """Return the rotary embedding of heads of width `head_dim`, the same in all layers."""
    parameters = rope_parameters(config)
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModelError("rotary parameters by layer type are not supported")
    return replace(rope_from(config, parameters, head_dim), interleaved=interleaved)


def rope_parameters(config: Config) -> dict[str, Any]:
    """Return the rotary parameters except the base; `rope_scaling` of the first releases precedes `rope_parameters`."""
    parameters: dict[str, Any] = config.get("rope_scaling") or first(config, "rope_parameters", default={})
    return parameters


def rope_from(config: Config, parameters: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """Return the rotary embedding of one set of parameters; the configuration supplies missing ones."""
    theta = float(first(parameters, "rope_theta") or need(config, "rope_theta"))
    partial = first(parameters, "partial_rotary_factor", default=first(config, "partial_rotary_factor", default=1.0))
    if first(parameters, "rope_type", "type") == "proportional":
        turning = ProportionalScaling(int(partial * head_dim // 2), float(first(parameters, "factor", default=1.0)))
        return RopeSpec(theta, head_dim, turning)
    return RopeSpec(theta, int(head_dim * partial), _rope_scaling(config, parameters))


def rope_of_kind(config: Config, kind: str, head_dim: int) -> RopeSpec:
    """Return the rotary embedding of a kind of layer, where `rope_parameters` has one for each kind."""
    return rope_from(config, config["rope_parameters"][kind], head_dim)


def _rope_scaling(config: Config, parameters: Mapping[str, Any]) -> RopeScaling | None:
    kind = first(parameters, "rope_type", "type", default="default")
    if kind in ("default", "dynamic"):  # dynamic has no effect below max_position_embeddings, the engine's limit
        return None
    if kind == "linear":
        return LinearScaling(float(parameters["factor"]))
    most = config["max_position_embeddings"]
    original = first(config, "original_max_position_embeddings") or first(
        parameters, "original_max_position_embeddings", default=most
    )
    factor = float(first(parameters, "factor", default=most / original))
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        return Llama3Scaling(factor, low, high, original)
    if kind in ("longrope", "su"):
        return _long_rope(parameters, factor, original, most)
    if kind == "yarn":
        return YarnScaling(
            factor=factor,
            beta_fast=float(parameters.get("beta_fast") or 32),
            beta_slow=float(parameters.get("beta_slow") or 1),
            original_max_positions=original,
            attention_factor=_yarn_attention_factor(parameters, factor),
            truncate=bool(parameters.get("truncate", True)),
        )
    known = "default, dynamic, linear, llama3, longrope, proportional, yarn"
    raise UnsupportedModelError(f"rope type {kind!r} is not supported; known: {known}")


def _long_rope(parameters: Mapping[str, Any], factor: float, original: int, most: int) -> LongRopeScaling:
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def factors(length: str) -> LongRopeFactors:
        attention_factor = first(parameters, f"{length}_mscale", "attention_factor", default=default)
        return LongRopeFactors(tuple(map(float, parameters[f"{length}_factor"])), float(attention_factor))

    return LongRopeScaling(factors("short"), factors("long"), original, most)


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, weight: float) -> float:
    """Return YaRN's attention factor, 0.1 · weight · ln(factor) + 1, for contexts extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def quantization_settings(config: Config) -> Config:
    """Return the quantization settings; older versions of compressed-tensors write them under another key."""
    settings: Config = first(config, "quantization_config", "compression_config", default={})
    beside = config.get("expert_dtype")  # as DeepSeek-V4 is published
    return {"expert_dtype": beside, **settings} if settings and beside is not None else settings


def checkpoint_dtype(config: Config) -> str:
    """Return the name of the type of the weights on disk; for quantized weights, that of the original weights."""
    default = "bfloat16" if quantization_settings(config) else "float32"
    return str(first(config, "dtype", "torch_dtype", default=default)).removeprefix("torch.")


def read_mtp(config: Config, read_layer: Callable[[Config, int], LayerSpec]) -> Features:
    """Return the features of multi-token prediction (MTP).

    These are the specs of the MTP layers, and their prefixes, which decoding ignores.
    """
    last, num_mtp_layers = (
        config["num_hidden_layers"],
        first(config, "num_nextn_predict_layers", "num_mtp_layers", default=0),
    )
    return {
        "ignored_prefixes": tuple(f"model.layers.{last + index}." for index in range(num_mtp_layers)),
        "mtp_layers": tuple(read_layer(config, last + index) for index in range(num_mtp_layers)),
    }


def require(config: Config, family: str, **only: Any) -> None:
    """Raise UnsupportedModelError if a key has another value than the one supported in the family."""
    for key, value in only.items():
        said = first(config, key, default=value)
        if said != value:
            raise UnsupportedModelError(f"{key} {said!r} is not supported in {family}; known: {value}")


def require_unlimited_time_steps(config: Config, key: str) -> None:
    """Raise UnsupportedModelError if `key` limits the time steps of Mamba-2 layers."""
    limits = config.get(key) or (0.0, math.inf)
    # transformers writes infinity as {"__float__": "Infinity"}
    lowest, highest = (float(one["__float__"] if isinstance(one, dict) else one) for one in limits)
    if (lowest, highest) != (0.0, math.inf):
        raise UnsupportedModelError(f"{key} {list(limits)} is not supported; known: [0.0, Infinity]")


def require_oblong_experts(config: Config, width: int, family: str) -> None:
    """Raise UnsupportedModelError if experts are square, where checkpoints of the family store them transposed."""
    hidden = config["hidden_size"]
    if hidden in (width, 2 * width):
        raise UnsupportedModelError(
            f"hidden_size {hidden} and intermediate_size {width} make square tensors of experts, which {family} "
            "checkpoints store transposed, and a shape cannot tell: no released model has them"
        )


def read_activation(config: Config, key: str = "hidden_act") -> Activation:
    """Return the activation that `key` names. Raises UnsupportedModelError."""
    name = need(config, key)
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"{key} {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def read_attention(config: Config, **features: Any) -> AttentionSpec:
    """Return the attention; `features` override defaults that follow from the heads, such as `scale`."""
    heads = config["num_attention_heads"]
    head_dim = first(config, "head_dim", default=config["hidden_size"] // heads)
    kv_heads = first(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if "rope" not in features:
        features["rope"] = read_rope(config, head_dim)
    return AttentionSpec(heads, kv_heads, head_dim, **({"scale": head_dim**-0.5} | features))


def read_routing(
    config: Config, experts_key: str, *, top_k_key: str = "num_experts_per_tok", renormalize: bool, **features: Any
) -> RoutingSpec:
    """Return the routing, read from the family's own keys. Raises ConfigError, and KeyError for a missing key."""
    experts, top_k = need(config, experts_key), need(config, top_k_key)
    if not 0 < top_k <= experts:
        raise ConfigError(f"{top_k_key} {top_k} must be between 1 and {experts_key} {experts}")
    try:
        return RoutingSpec(experts, top_k, renormalize, **features)
    except KernelInputError as exc:
        raise ConfigError(f"config.json has invalid routing settings: {exc}") from exc


def read_sigmoid_mixture(config: Config, index: int) -> DenseSpec | MoeSpec:
    """Return the feed-forward of a layer in the style of DeepSeek-V3; the first layers are dense."""
    if index < config["first_k_dense_replace"]:
        return DenseSpec(config["intermediate_size"], activation=read_activation(config))
    return read_sigmoid_experts(config)


def is_dense_layer(config: Config, index: int, *, num_dense: int = 1) -> bool:
    """Return whether `mlp_layer_types` has a dense feed-forward in the layer; without it the first layers are dense."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return index < num_dense
    return index < len(kinds) and kinds[index] == "dense"  # further layers predict further tokens, and have experts


def is_sliding_layer(config: Config, index: int, *, otherwise: bool) -> bool:
    """Return whether `layer_types` has a sliding window in the layer; `otherwise`: the result if it is absent."""
    kinds = config.get("layer_types")
    if kinds is None:
        return otherwise
    if kinds[index] not in ("sliding_attention", "full_attention"):
        known = "full_attention, sliding_attention"
        raise UnsupportedModelError(f"layer type {kinds[index]!r} is not supported; known: {known}")
    return bool(kinds[index] == "sliding_attention")


def read_shared(width: int, activation: Activation, *, bias: bool = False) -> SharedSpec | None:
    """Return the shared experts of a total width; None if it is 0."""
    return SharedSpec(DenseSpec(width, bias, activation)) if width else None


def read_sigmoid_experts(
    config: Config,
    experts_key: str = "n_routed_experts",
    shared_key: str = "n_shared_experts",
    shared_width_key: str = "moe_intermediate_size",
    activation: Activation | None = None,
) -> MoeSpec:
    """Return the experts of a layer in the style of DeepSeek-V3, which other families use too.

    Experts are scored by a sigmoid and chosen from the best groups with a selection bias, with shared experts in
    addition. `shared_width_key`: key of the width of a shared expert, if it can differ from that of a routed one.
    `activation`: None: that of `hidden_act`.
    """
    activation = activation or read_activation(config)
    routing = read_routing(
        config,
        experts_key,
        renormalize=bool(config["norm_topk_prob"]),
        scoring="sigmoid",
        num_groups=config["n_group"],
        top_groups=config["topk_group"],
        group_score="best_two",
        scale=float(config["routed_scaling_factor"]),
    )
    width, num_shared = config["moe_intermediate_size"], first(config, shared_key, default=0)
    shared = read_shared(num_shared * first(config, shared_width_key, default=width), activation)
    return MoeSpec(width, routing, activation, selection_bias=True, exact_router=True, shared=shared)
