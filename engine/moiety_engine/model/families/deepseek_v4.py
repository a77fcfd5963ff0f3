"""DeepSeek-V4: compressed attention, hyper-connections, and experts that a hash of the token chooses in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moiety_engine.model.compressed_specs import CompressedAttentionSpec, EntryIndexerSpec, PoolSpec, StreamsSpec
from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    read_routing,
    require,
    rope_from,
    rope_parameters,
)
from moiety_engine.model.mtp_names import DEEPSEEK_V4_MTP
from moiety_engine.model.rope_spec import RopeSpec
from moiety_engine.model.spec import DenseSpec, LayerSpec, MoeSpec, SharedSpec
from moiety_kernels.moe.activation import Activation

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_KIND_OF_RATIO = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
_RATES = {_SPARSE: ("compress_rate_csa", 4), _HEAVY: ("compress_rate_hca", 128)}
_HASHED, _ROUTED = "hash_moe", "moe"
_MOST_STREAMS = 16
_ROTATED_SHARE = 64 / 512  # of a head, if the configuration does not say


def deepseek_v4(config: Config, index: int) -> LayerSpec:
    """Return a layer of DeepSeek-V4."""
    require(config, "deepseek_v4", scoring_func="sqrtsoftplus", norm_topk_prob=True, n_shared_experts=1)
    require(config, "deepseek_v4", hidden_act="silu", num_key_value_heads=1, attention_bias=False, mlp_bias=False)
    return LayerSpec(
        _attention(config, _attention_kind(config, index)), _mixture(config, hashed=_hashed(config, index))
    )


def deepseek_v4_features(config: Config) -> Features:
    """Return the residual streams, and the MTP layers, if there are any."""
    streams = StreamsSpec(config["hc_mult"], config["hc_sinkhorn_iters"], float(config["hc_eps"]))
    if not 1 <= streams.num_streams <= _MOST_STREAMS:
        raise ConfigError(f"hc_mult {streams.num_streams} must be in 1 … {_MOST_STREAMS}")
    if streams.iterations < 1:
        raise ConfigError(f"hc_sinkhorn_iters {streams.iterations} must be at least 1")
    features: Features = {"streams": streams, "ignored_prefixes": ("mtp.", "model.mtp.")}
    num_mtp_layers = first(config, "num_nextn_predict_layers", default=0)
    if not num_mtp_layers:
        return features
    ratios = (config.get("compress_ratios") or ())[config["num_hidden_layers"] :]
    if any(ratios):
        compressed = next(ratio for ratio in ratios if ratio)
        raise UnsupportedModelError(f"an MTP layer with compress_ratios {compressed} is not supported in deepseek_v4")
    attention = replace(_attention(config, _SLIDING), rows_in_blocks=True)
    layer = LayerSpec(attention, _mixture(config, hashed=False))
    return features | {"mtp_layers": (layer,) * num_mtp_layers, "mtp_names": DEEPSEEK_V4_MTP}


def _attention_kind(config: Config, index: int) -> str:
    kinds, ratios = config.get("layer_types"), config.get("compress_ratios")
    if kinds is None and ratios is not None:
        kinds = [_KIND_OF_RATIO.get(ratio, f"with compress_ratios {ratio}") for ratio in ratios]
    if kinds is None:
        return _SPARSE if index >= 2 and index % 2 else _HEAVY
    if kinds[index] not in (_SLIDING, *_RATES):
        known = ", ".join((_SLIDING, *_RATES))
        raise UnsupportedModelError(f"layer type {kinds[index]!r} is not supported in deepseek_v4; known: {known}")
    return str(kinds[index])


def _attention(config: Config, kind: str) -> CompressedAttentionSpec:
    heads, width, groups = config["num_attention_heads"], config["head_dim"], config["o_groups"]
    if heads % groups:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of o_groups {groups}")
    spec = CompressedAttentionSpec(
        num_heads=heads,
        head_dim=width,
        query_rank=config["q_lora_rank"],
        rope=_rope(config, "main" if kind == _SLIDING else "compress"),
        scale=width**-0.5,
        window=config["sliding_window"],
        output_groups=groups,
        output_rank=config["o_lora_rank"],
        norm_eps=float(config["rms_norm_eps"]),
        pool=None if kind == _SLIDING else _pool(config, kind),
    )
    narrowest = min((width, *spec.entry_widths))
    if not 0 < spec.rope.rotary_width <= narrowest or spec.rope.rotary_width % 2:
        raise ConfigError(
            f"{spec.rope.rotary_width} rotated entries must be an even number of at most head_dim {width} and "
            f"index_head_dim {config['index_head_dim']}"
        )
    return spec


def _pool(config: Config, kind: str) -> PoolSpec:
    legacy, default = _RATES[kind]
    rates: dict[str, Any] = first(config, "compress_rates", default={_SPARSE: 4, _HEAVY: 128})
    rate = first(config, legacy, default=rates.get(kind))
    if not isinstance(rate, int) or rate < 1:
        raise ConfigError(f"compress_rates has {rate!r} for {kind}: it must be a number of tokens, such as {default}")
    if kind == _HEAVY:
        return PoolSpec(rate, overlaps=False, indexer=None)
    for key in ("index_topk", "index_n_heads", "index_head_dim"):
        if config[key] < 1:
            raise ConfigError(f"{key} {config[key]} must be at least 1")
    indexer = EntryIndexerSpec(config["index_n_heads"], config["index_head_dim"], config["index_topk"])
    return PoolSpec(rate, overlaps=True, indexer=indexer)


def _rope(config: Config, label: str) -> RopeSpec:
    """Return the rotary embedding of layers without entries (`main`) or with them (`compress`).

    `rope_parameters` has both, or only the scaling of `compress`, without its base.
    """
    parameters, share = rope_parameters(config), config.get("partial_rotary_factor")
    if share is None:
        rotated = config.get("qk_rope_head_dim")
        share = _ROTATED_SHARE if rotated is None else rotated / config["head_dim"]
    if all(isinstance(parameters.get(one), dict) for one in ("main", "compress")):
        given = {"partial_rotary_factor": 1.0, **parameters[label]}
        return rope_from(config, given, config["head_dim"])
    if label == "main":
        return RopeSpec(float(config["rope_theta"]), int(config["head_dim"] * share))
    scaling = {key: value for key, value in parameters.items() if key not in ("main", "compress")}
    if first(scaling, "rope_type", "type") == "yarn":
        scaling = {"attention_factor": 1.0, **scaling}
    own = {"rope_theta": config["compress_rope_theta"], "partial_rotary_factor": share}
    return rope_from(config, scaling | own, config["head_dim"])


def _hashed(config: Config, index: int) -> bool:
    """Return whether a hash chooses the layer's experts."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return bool(index < first(config, "num_hash_layers", default=3))
    if kinds[index] not in (_HASHED, _ROUTED):
        raise UnsupportedModelError(
            f"feed-forward {kinds[index]!r} is not supported in deepseek_v4; known: {_HASHED}, {_ROUTED}"
        )
    return bool(kinds[index] == _HASHED)


def _mixture(config: Config, *, hashed: bool) -> MoeSpec:
    activation = Activation("limited_silu", limit=float(config["swiglu_limit"]))
    routing = read_routing(
        config,
        "n_routed_experts",
        renormalize=True,
        scoring="sqrt_softplus",
        scale=float(config["routed_scaling_factor"]),
    )
    width = config["moe_intermediate_size"]
    shared = SharedSpec(DenseSpec(width, activation=activation))
    return MoeSpec(
        width,
        routing,
        activation,
        selection_bias=not hashed,
        exact_router=True,
        hashed_tokens=config["vocab_size"] if hashed else 0,
        shared=shared,
    )
