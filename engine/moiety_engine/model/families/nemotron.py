"""Nemotron-H and Nemotron 3: Mamba-2, attention and feed-forwards, each a layer of its own on disk."""

from __future__ import annotations

from dataclasses import replace

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families.config import (
    Config,
    Features,
    first,
    read_attention,
    read_sigmoid_experts,
    require,
    require_unlimited_time_steps,
)
from moiety_engine.model.mtp_names import nemotron_mtp_names
from moiety_engine.model.recurrent_specs import Mamba2Spec
from moiety_engine.model.rope_spec import NO_ROPE
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, MoeSpec, NormSpec, SharedSpec
from moiety_kernels.moe.activation import RELU2

_TYPE_OF_LETTER = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_MIXERS = ("linear_attention", "full_attention")  # which begin a layer of the spec
_DEFAULT_LAYER_TYPES = ["linear_attention", "moe", "full_attention", "mlp"]
_DEFAULT_MTP_TYPES = ["full_attention", "moe"]


def nemotron_h(config: Config, index: int) -> LayerSpec:
    """Return a layer: one of Mamba-2 or attention on disk, and the feed-forward after it, if there is one."""
    kinds = _kinds(config)
    start = _starts(kinds)[index]
    return _layer(config, kinds[start], kinds[start + 1] if start + 1 < len(kinds) else None)


def nemotron_h_features(config: Config) -> Features:
    """Return the norms, the layers on disk that begin a layer, the MTP layer, and its prefix, which decoding ignores.

    Of several MTP layers the first is meant.
    """
    kinds = _kinds(config)
    starts = _starts(kinds)
    for index in range(len(kinds)):
        if kinds[index] not in _MIXERS and index - 1 not in starts:
            raise UnsupportedModelError(
                f"layer {index} is a feed-forward ({kinds[index]}) without a layer of Mamba-2 or attention before it, "
                "which is not supported in nemotron_h: no released model has one"
            )
    features: Features = {
        "norm": NormSpec(float(config["layer_norm_epsilon"])),
        "block_starts": starts,
        "ignored_prefixes": ("mtp.",),
    }
    if not first(config, "num_nextn_predict_layers", default=0):
        return features
    kinds = _mtp_kinds(config)
    layer = _layer(config, kinds[0], kinds[1] if len(kinds) > 1 else None)
    return features | {"mtp_layers": (layer,), "mtp_names": nemotron_mtp_names(len(kinds))}


def _layer(config: Config, mixer_kind: str, following: str | None) -> LayerSpec:
    """Return a layer. `following`: kind of the layer on disk after the mixer; None if there is none."""
    mixer = _mamba2(config) if mixer_kind == "linear_attention" else _attention(config)
    if following is None or following in _MIXERS:
        return LayerSpec(mixer, None)
    require(config, "nemotron_h", mlp_hidden_act="relu2")
    return LayerSpec(mixer, _mixture(config) if following == "moe" else _dense(config, config["intermediate_size"]))


def _starts(kinds: list[str]) -> tuple[int, ...]:
    return tuple(index for index, kind in enumerate(kinds) if kind in _MIXERS)


def _kinds(config: Config) -> list[str]:
    """Return the kind of each layer on disk, from a list or from a pattern with a character for each layer."""
    kinds = config.get("layers_block_type")
    if kinds is None:
        kinds = first(config, "hybrid_override_pattern", default=_DEFAULT_LAYER_TYPES)
    return _known_kinds(kinds)


def _mtp_kinds(config: Config) -> list[str]:
    """Return the kind of each layer on disk of the MTP layer: attention, and mostly experts."""
    kinds = _known_kinds(config.get("mtp_layers_block_type") or _DEFAULT_MTP_TYPES)
    if kinds == _DEFAULT_MTP_TYPES:  # which transformers writes beside a pattern, too
        kinds = _known_kinds(first(config, "mtp_hybrid_override_pattern", default=kinds))
    if kinds[0] != "full_attention" or len(kinds) > 2 or kinds[1:] in ([one] for one in _MIXERS):
        raise UnsupportedModelError(
            f"an MTP layer of {', '.join(kinds)} is not supported in nemotron_h; known: full_attention, or "
            "full_attention and one of moe and mlp"
        )
    return kinds


def _known_kinds(kinds: str | list[str]) -> list[str]:
    """Return the kinds of layers that names, or the characters of a pattern, stand for."""
    if isinstance(kinds, str):
        kinds = [_TYPE_OF_LETTER.get(one, one) for one in kinds]
    kinds = [_OLD_NAMES.get(kind, kind) for kind in kinds]
    for kind in kinds:
        if kind not in _TYPE_OF_LETTER.values():
            known = ", ".join(f"{name} ({one})" for one, name in _TYPE_OF_LETTER.items())
            raise UnsupportedModelError(f"layer type {kind!r} is not supported in nemotron_h; known: {known}")
    return kinds


def _attention(config: Config) -> AttentionSpec:
    """Return the attention, which has no positions."""
    require(config, "nemotron_h", attention_bias=False)
    return read_attention(config, rope=NO_ROPE)


def _mamba2(config: Config) -> Mamba2Spec:
    """Return the Mamba-2 layer; older files have some of its sizes under other keys."""
    require(config, "nemotron_h", mamba_hidden_act="silu")
    require_unlimited_time_steps(config, "mamba_dt_limit" if "mamba_dt_limit" in config else "time_step_limit")
    groups = first(config, "mamba_n_groups", "n_groups")
    return Mamba2Spec(
        num_heads=config["mamba_num_heads"],
        num_groups=groups,
        head_width=config["mamba_head_dim"],
        state_width=config["ssm_state_size"],
        conv_taps=first(config, "mamba_d_conv", "conv_kernel"),
        norm_eps=float(config["layer_norm_epsilon"]),
        conv_bias=bool(first(config, "mamba_conv_bias", "use_conv_bias")),
        bias=bool(config["use_bias"]),
        is_one_group=groups == 1,
    )


def _dense(config: Config, width: int) -> DenseSpec:
    return DenseSpec(width, bool(config["mlp_bias"]), RELU2)


def _mixture(config: Config) -> MoeSpec:
    require(config, "nemotron_h", n_shared_experts=1)
    latent = config.get("moe_latent_size")
    if latent is not None and config["mlp_bias"]:
        raise UnsupportedModelError("mlp_bias is not supported in nemotron_h with moe_latent_size")
    shared = SharedSpec(_dense(config, config["moe_shared_expert_intermediate_size"]))
    return replace(read_sigmoid_experts(config, activation=RELU2), shared=shared, latent_width=latent)
