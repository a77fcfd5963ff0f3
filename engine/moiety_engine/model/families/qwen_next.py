"""Qwen3-Next and Qwen 3.5: three gated DeltaNet layers, then one with gated attention.

Of Qwen 3.5, which sees images, the text model is served.
"""

from __future__ import annotations

from moiety_engine.model.attention_options import OutputGateSpec
from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    read_activation,
    read_attention,
    read_routing,
    require,
)
from moiety_engine.model.mtp_names import QWEN_MTP
from moiety_engine.model.recurrent_specs import GatedDeltaSpec
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, MoeSpec, NormSpec, SharedSpec

FULL_INTERVAL = 4  # every fourth layer has full attention unless config.json says otherwise


def qwen3_next(config: Config, index: int) -> LayerSpec:
    step = config["decoder_sparse_step"]
    if index in (config.get("mlp_only_layers") or ()) or (index + 1) % step:
        return qwen3_5(config, index)
    return _with_experts(config, index, renormalize=bool(config["norm_topk_prob"]))


def qwen3_5(config: Config, index: int) -> LayerSpec:
    return LayerSpec(
        _attention(config, index), DenseSpec(config["intermediate_size"], activation=read_activation(config))
    )


def qwen3_5_moe(config: Config, index: int) -> LayerSpec:
    return _with_experts(config, index, renormalize=True)


def qwen3_next_features(config: Config) -> Features:
    """Return the norms, the MTP layers, and their tensors and those of the vision encoder as ignored.

    Config.json of Qwen3-Next does not say that there is an MTP layer; whether there is one is seen when it is loaded.
    """
    norm = NormSpec(float(config["rms_norm_eps"]), weight_offset=1.0)
    return {
        "norm": norm,
        "ignored_prefixes": ("mtp.", "model.visual.", "visual."),
        "mtp_layers": _mtp_layers(config),
        "mtp_names": QWEN_MTP,
    }


def _mtp_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Return the MTP layers, with full attention; () if there are none or if they have a vocabulary of their own."""
    count: int = first(config, "mtp_num_hidden_layers", "num_nextn_predict_layers", default=1)
    if not count or config.get("mtp_use_dedicated_embeddings"):
        return ()
    if config["model_type"] in ("qwen3_5", "qwen3_5_text"):
        ffn: DenseSpec | MoeSpec = DenseSpec(config["intermediate_size"], activation=read_activation(config))
    else:
        renormalize = config["model_type"] != "qwen3_next" or bool(config["norm_topk_prob"])
        ffn = _mixture(config, renormalize=renormalize)
    return (LayerSpec(_full(config), ffn),) * count


def _with_experts(config: Config, index: int, *, renormalize: bool) -> LayerSpec:
    return LayerSpec(_attention(config, index), _mixture(config, renormalize=renormalize))


def _mixture(config: Config, *, renormalize: bool) -> MoeSpec:
    activation = read_activation(config)
    routing = read_routing(config, "num_experts", renormalize=renormalize)
    shared = SharedSpec(DenseSpec(config["shared_expert_intermediate_size"], activation=activation), gated=True)
    return MoeSpec(config["moe_intermediate_size"], routing, activation, shared=shared)


def _attention(config: Config, index: int) -> AttentionSpec | GatedDeltaSpec:
    require(config, config["model_type"], attention_bias=False)
    return _delta(config) if _is_linear(config, index) else _full(config)


def _is_linear(config: Config, index: int) -> bool:
    kinds = config.get("layer_types")
    if kinds is None:
        return (index + 1) % (config.get("full_attention_interval") or FULL_INTERVAL) != 0
    if kinds[index] not in ("linear_attention", "full_attention"):
        raise UnsupportedModelError(f"layer type {kinds[index]!r} is not supported in {config['model_type']}")
    return bool(kinds[index] == "linear_attention")


def _full(config: Config) -> AttentionSpec:
    return read_attention(config, qk_norm="head", gate=OutputGateSpec("sigmoid", in_query_projection=True))


def _delta(config: Config) -> GatedDeltaSpec:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if values % keys:
        raise ConfigError(f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}")
    return GatedDeltaSpec(
        num_key_heads=keys,
        num_value_heads=values,
        key_width=config["linear_key_head_dim"],
        value_width=config["linear_value_head_dim"],
        conv_taps=config["linear_conv_kernel_dim"],
        norm_eps=float(config["rms_norm_eps"]),
    )
