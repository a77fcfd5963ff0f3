"""K-EXAONE (EXAONE with experts)."""

from __future__ import annotations

from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    is_dense_layer,
    is_sliding_layer,
    read_activation,
    read_attention,
    read_sigmoid_experts,
)
from moiety_engine.model.mtp_names import QWEN_MTP
from moiety_engine.model.rope_spec import NO_ROPE
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec


def exaone_moe(config: Config, index: int) -> LayerSpec:
    """Return a layer; those with full attention have no rotary embedding if other layers have windows."""
    sliding = is_sliding_layer(config, index, otherwise=_slides_by_pattern(config, index))
    attention = _attention(config, sliding=sliding)
    if is_dense_layer(config, index, num_dense=config["first_k_dense_replace"]):
        return LayerSpec(attention, _dense(config))
    return LayerSpec(attention, read_sigmoid_experts(config, "num_experts", "num_shared_experts"))


def _attention(config: Config, *, sliding: bool) -> AttentionSpec:
    window = config["sliding_window"]
    features = {"window": window} if sliding else {} if window is None else {"rope": NO_ROPE}
    return read_attention(config, qk_norm="head", **features)


def _dense(config: Config) -> DenseSpec:
    return DenseSpec(config["intermediate_size"], activation=read_activation(config))


def _slides_by_pattern(config: Config, index: int) -> bool:
    pattern = config["sliding_window_pattern"]
    if config.get("layer_types") is not None:
        return False
    if not isinstance(pattern, int) or config["sliding_window"] is None:
        raise ConfigError(
            f"config.json has no layer_types, and sliding_window_pattern {pattern!r} with sliding_window "
            f"{config['sliding_window']!r} does not define them; add layer_types, with a kind for each layer"
        )
    return (index + 1) % pattern != 0


def exaone_features(config: Config) -> Features:
    """Return the features of multi-token prediction (MTP): the MTP layers, which are dense, and their names.

    Their kinds of attention are those of `mtp_layer_types`, or else that of the model's first layer.
    """
    features: Features = {"ignored_prefixes": ("mtp.", "model.mtp.")}
    num_mtp_layers = first(config, "num_nextn_predict_layers", default=0)
    if not num_mtp_layers:
        return features
    if config.get("mtp_sliding_windows") is not None:
        raise UnsupportedModelError("mtp_sliding_windows is not supported in exaone_moe: remove MTP layers or the key")
    kinds = config.get("mtp_layer_types") or (config.get("layer_types") or [])[:1]
    of_mtp = config | {"layer_types": [*kinds, *kinds[-1:] * num_mtp_layers] or None}
    otherwise = _slides_by_pattern(config, 0)
    slides = [is_sliding_layer(of_mtp, index, otherwise=otherwise) for index in range(num_mtp_layers)]
    layers = tuple(LayerSpec(_attention(config, sliding=sliding), _dense(config)) for sliding in slides)
    return features | {"mtp_layers": layers, "mtp_names": QWEN_MTP}
