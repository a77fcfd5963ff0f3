"""MiniMax-01 and MiniMax-M1 (their text), and MiniMax-M2."""

from __future__ import annotations

from dataclasses import replace

from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    read_activation,
    read_attention,
    read_routing,
    require,
    rope_parameters,
)
from moiety_engine.model.recurrent_specs import LightningSpec
from moiety_engine.model.residual_specs import NormedResidual
from moiety_engine.model.spec import AttentionSpec, LayerSpec, MoeSpec
from moiety_kernels.moe.activation import SILU

_KIND_OF_NUMBER = {0: "linear_attention", 1: "full_attention"}
_LIGHTNING_NORM_EPS = 1e-6  # independent of the other norms


def minimax(config: Config, index: int) -> LayerSpec:
    """Return a layer with lightning or full attention, whose residual connections start after the norms."""
    kinds = config.get("layer_types")
    kind = kinds[index] if kinds is not None else ("full_attention", "linear_attention")[index % 2]
    if kind not in ("full_attention", "linear_attention"):
        raise UnsupportedModelError(f"layer type {kind!r} is not supported in minimax; known: full, linear_attention")
    linear = kind == "linear_attention"
    attention = _lightning(config, index) if linear else read_attention(config, window=config.get("sliding_window"))
    factors = "linear_attn" if linear else "full_attn"
    residual = NormedResidual(
        *(float(config[f"{half}_{name}_factor"]) for half in (factors, "mlp") for name in ("alpha", "beta"))
    )
    routing = read_routing(config, "num_local_experts", renormalize=True)
    return LayerSpec(
        attention, MoeSpec(config["intermediate_size"], routing, read_activation(config)), residual=residual
    )


# Keys of the first releases, and their names in the family's class.
_PUBLISHED_KEYS = {
    f"layernorm_{theirs}_{factor}": f"{ours}_{factor}_factor"
    for theirs, ours in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
    for factor in ("alpha", "beta")
}


def first_minimax_config(config: Config) -> Config:
    """Return a configuration of `minimax_text_01` or `minimax_m1` with the keys of `minimax`.

    Raises ConfigError and UnsupportedModelError.
    """
    family = config["model_type"]
    require(config, family, postnorm=True, shared_intermediate_size=0)
    kinds, rotary_width = config.get("attn_type_list"), config.get("rotary_dim")
    if not isinstance(kinds, list):
        raise ConfigError(f"config.json of a {family} model has no attn_type_list, with 0 or 1 for each layer")
    read = ("attn_type_list", "postnorm", "rotary_dim", "shared_intermediate_size", "shared_moe_mode")
    found = {_PUBLISHED_KEYS.get(key, key): value for key, value in config.items() if key not in read}
    found |= {"model_type": "minimax", "layer_types": [_KIND_OF_NUMBER.get(kind, kind) for kind in kinds]}
    if rotary_width is not None:
        head_dim = first(config, "head_dim", default=config["hidden_size"] // config["num_attention_heads"])
        found["partial_rotary_factor"] = rotary_width / head_dim
    return found


def _lightning(config: Config, index: int) -> LightningSpec:
    """Return lightning attention; the decays become slower from layer to layer, and from head to head."""
    if read_activation(config) != SILU:
        raise UnsupportedModelError("lightning attention is supported with hidden_act silu only")
    heads = config["num_attention_heads"]
    of_layer = 1 - index / (config["num_hidden_layers"] - 1 + 1e-5) + 1e-5
    decays = tuple(2 ** (-8 / heads * (head + 1)) * of_layer for head in range(heads))
    width = first(config, "head_dim", default=config["hidden_size"] // heads)
    return LightningSpec(heads, width, decays, _LIGHTNING_NORM_EPS)


def minimax_m2(config: Config, _index: int) -> LayerSpec:
    require(config, "minimax_m2", scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer")
    require(config, "minimax_m2", use_routing_bias=True, shared_intermediate_size=0)
    routing = read_routing(config, "num_local_experts", renormalize=True, scoring="sigmoid")
    experts = MoeSpec(
        config["intermediate_size"], routing, read_activation(config), selection_bias=True, exact_router=True
    )
    return LayerSpec(_attention(config), experts)


def _attention(config: Config) -> AttentionSpec:
    """Return the attention; released checkpoints state the rotated part of a head as a width, `rotary_dim`."""
    attention = read_attention(config, qk_norm="full")
    rotary_width = config.get("rotary_dim")
    partial = first(rope_parameters(config), "partial_rotary_factor") or first(config, "partial_rotary_factor")
    if rotary_width is None or partial is not None:
        return attention
    return replace(attention, rope=replace(attention.rope, rotary_width=rotary_width))


def minimax_m2_features(_config: Config) -> Features:
    """Return the prefixes of multi-token prediction layers, which released checkpoints announce but do not have."""
    return {"ignored_prefixes": ("model.mtp.",)}
