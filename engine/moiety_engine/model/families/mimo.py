"""MiMo-V2 (Xiaomi)."""

from __future__ import annotations

from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    is_dense_layer,
    is_sliding_layer,
    read_activation,
    read_attention,
    read_sigmoid_experts,
    require,
    rope_of_kind,
)
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec

_NUM_MTP_LAYERS = 3  # of the published checkpoints
_FULL_EVERY = 6  # the first layer, and from then on every sixth has full attention, unless layer_types says otherwise


def mimo_v2_flash(config: Config, index: int) -> LayerSpec:
    """Return a layer; those with a window have twice the key-value heads, and attention sinks."""
    attention = _attention(config, slides=_slides(config, index))
    frequency = config.get("moe_layer_freq")  # old files: 1 for experts
    is_dense = is_dense_layer(config, index) if frequency is None else not frequency[index]
    if is_dense:
        return LayerSpec(attention, DenseSpec(config["intermediate_size"], activation=read_activation(config)))
    scaled = config | {"routed_scaling_factor": first(config, "routed_scaling_factor", default=1.0)}
    return LayerSpec(attention, read_sigmoid_experts(scaled))


def _slides(config: Config, index: int) -> bool:
    pattern = config.get("hybrid_layer_pattern")  # old files: 1 for a window
    usual = index > 0 and bool((index + 1) % _FULL_EVERY) if pattern is None else bool(pattern[index])
    return is_sliding_layer(config, index, otherwise=usual)


def _attention(config: Config, *, slides: bool) -> AttentionSpec:
    kind, kv_heads = "sliding_attention" if slides else "full_attention", config["num_key_value_heads"]
    of_layer = config | {"num_key_value_heads": 2 * kv_heads if slides else kv_heads}
    _check_old_keys(config)
    previous = config.get("sliding_window_size")  # of old files: without the query's own position
    window = config["sliding_window"] if previous is None else previous + 1
    return read_attention(
        of_layer,
        rope=rope_of_kind(config, kind, config["head_dim"]),
        qkv_bias=bool(config["attention_bias"]),
        own_value_width=config["v_head_dim"],
        value_scale=float(first(config, "attention_value_scale", default=1.0)),
        window=window if slides else None,
        sinks=slides,
    )


def _check_old_keys(config: Config) -> None:
    """Raise UnsupportedModelError if keys of the first release differ from those that transformers reads."""
    by_kind = config["rope_parameters"]
    require(
        config,
        "mimo_v2_flash",
        scoring_func="sigmoid",
        n_shared_experts=0,
        add_full_attention_sink_bias=False,
        add_swa_attention_sink_bias=True,
        swa_num_attention_heads=config["num_attention_heads"],
        swa_num_key_value_heads=2 * config["num_key_value_heads"],
        swa_head_dim=config["head_dim"],
        swa_v_head_dim=config["v_head_dim"],
        rope_theta=by_kind["full_attention"]["rope_theta"],
        swa_rope_theta=by_kind["sliding_attention"]["rope_theta"],
        partial_rotary_factor=by_kind["full_attention"].get("partial_rotary_factor"),
    )


def mimo_features(config: Config) -> Features:
    """Return the multi-token prediction (MTP) layers, which are dense and have a window, and their prefix.

    Config.json does not say how many there are; those in the files are used. Each reads the hidden states of the model
    (source: SGLang's multi-layer MTP).
    """
    count = first(config, "num_nextn_predict_layers", default=_NUM_MTP_LAYERS)
    dense = DenseSpec(config["intermediate_size"], activation=read_activation(config))
    layers = (LayerSpec(_attention(config, slides=True), dense),) * count
    return {"ignored_prefixes": ("model.mtp.",), "mtp_layers": layers, "mtp_reads_model": True}
