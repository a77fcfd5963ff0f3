"""K-EXAONE (EXAONE with experts)."""

from __future__ import annotations

from moiety_engine.model.errors import ConfigError
from moiety_engine.model.families.config import (
    Config,
    Features,
    is_dense_layer,
    is_sliding_layer,
    read_activation,
    read_attention,
    read_sigmoid_experts,
)
from moiety_engine.model.rope_spec import NO_ROPE
from moiety_engine.model.spec import DenseSpec, LayerSpec


def exaone_moe(config: Config, index: int) -> LayerSpec:
    """Return a layer; those with full attention have no rotary embedding if other layers have windows."""
    window = config["sliding_window"]
    sliding = is_sliding_layer(config, index, otherwise=_slides_by_pattern(config, index))
    features = {"window": window} if sliding else {} if window is None else {"rope": NO_ROPE}
    attention = read_attention(config, qk_norm="head", **features)
    if is_dense_layer(config, index, num_dense=config["first_k_dense_replace"]):
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=read_activation(config)))
    return LayerSpec(attention, read_sigmoid_experts(config, "num_experts", "num_shared_experts"))


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


def exaone_features(_config: Config) -> Features:
    """Return the prefixes of the multi-token prediction layer, which is not loaded."""
    return {"ignored_prefixes": ("mtp.", "model.mtp.")}
