"""DBRX: clipped queries, keys and values, layer norms without biases, and fine-grained experts."""

from __future__ import annotations

from typing import Any

from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.config import Config, Features, first, read_activation, read_attention, read_routing
from moiety_engine.model.spec import LayerSpec, MoeSpec, NormSpec

_NORM_EPS = 1e-5  # of the class, which no key changes
# Keys of the two parts of the configuration, with their defaults, and their usual names.
_ATTENTION_KEYS: dict[str, tuple[str, Any]] = {
    "clip_qkv": ("clip_qkv", None),
    "kv_n_heads": ("num_key_value_heads", 1),
}
_FFN_KEYS: dict[str, tuple[str, Any]] = {
    "ffn_act_fn": ("ffn_act_fn", None),
    "ffn_hidden_size": ("intermediate_size", 3584),
    "moe_num_experts": ("num_local_experts", 4),
    "moe_top_k": ("num_experts_per_tok", 1),
    "moe_normalize_expert_weights": ("moe_normalize_expert_weights", 1.0),
}


def dbrx_config(config: Config) -> Config:
    """Return the configuration with the keys of `attn_config` and `ffn_config` under their usual names.

    The rotary base of `attn_config`, which published files state, precedes that of `rope_parameters`, which is the
    default of transformers 5 there.
    """
    attention, ffn = (first(config, key, default={}) for key in ("attn_config", "ffn_config"))
    found = {key: value for key, value in config.items() if key not in ("attn_config", "ffn_config")}
    read = {"hidden_size", "rope_theta", *_ATTENTION_KEYS, *_FFN_KEYS}
    for part, keys in ((attention, _ATTENTION_KEYS), (ffn, _FFN_KEYS)):
        others = {key: value for key, value in part.items() if key not in read}
        found = others | found  # they are named if they are not read
        found |= {usual: part.get(key, default) for key, (usual, default) in keys.items()}
    found["hidden_act"] = first(found.pop("ffn_act_fn") or {}, "name", default="silu")
    base = attention.get("rope_theta")
    stated = next((key for key in ("rope_scaling", "rope_parameters") if found.get(key)), None)
    if base is not None:
        found |= {"rope_theta": base} if stated is None else {stated: found[stated] | {"rope_theta": base}}
    return found


def dbrx(config: Config, _index: int) -> LayerSpec:
    """Return a layer; the weights of its experts are divided by their sum, or kept."""
    power = config["moe_normalize_expert_weights"]
    if power not in (None, 1):
        raise UnsupportedModelError(f"moe_normalize_expert_weights {power!r} is not supported; known: null and 1")
    attention = read_attention(config, clip=config["clip_qkv"])
    routing = read_routing(config, "num_local_experts", renormalize=power is not None)
    return LayerSpec(attention, MoeSpec(config["intermediate_size"], routing, read_activation(config)))


def dbrx_features(config: Config) -> Features:
    """Return the layer norms, which have no biases on disk. Raises ConfigError for tied embeddings, as transformers."""
    if config["tie_word_embeddings"]:
        raise ConfigError("tie_word_embeddings is not possible in a dbrx model, which has a head of its own")
    return {"norm": NormSpec(_NORM_EPS, kind="layer"), "zero_if_absent": ("norm_1.bias", "norm_2.bias", "norm_f.bias")}
