"""Jamba: Mamba, in few layers attention without positions, and experts in every other layer."""

from __future__ import annotations

import math

from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.config import Config, read_activation, read_attention, read_routing, require
from moiety_engine.model.recurrent_specs import MambaSpec
from moiety_engine.model.rope_spec import NO_ROPE
from moiety_engine.model.spec import DenseSpec, LayerSpec, MoeSpec
from moiety_kernels.moe.activation import SILU

_WIDTHS_A_STEP = 16  # the model's width, divided by the width of the time steps' latent row, if it is "auto"


def jamba(config: Config, index: int) -> LayerSpec:
    activation, width = read_activation(config), config["intermediate_size"]
    ffn: DenseSpec | MoeSpec = DenseSpec(width, activation=activation)
    if config["num_experts"] > 1 and _is_among(config, "expert_layer", index):
        ffn = MoeSpec(width, read_routing(config, "num_experts", renormalize=False), activation)
    if _is_among(config, "attn_layer", index):
        return LayerSpec(read_attention(config, rope=NO_ROPE), ffn)
    return LayerSpec(_mamba(config), ffn)


def _is_among(config: Config, kind: str, index: int) -> bool:
    """Return whether a layer is one of a kind that occurs once in a period, at an offset."""
    period, offset = config[f"{kind}_period"], config[f"{kind}_offset"]
    if offset >= period:
        raise ConfigError(f"{kind}_offset {offset} must be less than {kind}_period {period}")
    return bool(index % period == offset)


def _mamba(config: Config) -> MambaSpec:
    require(config, "jamba", mamba_inner_layernorms=True)
    if read_activation(config) != SILU:
        raise UnsupportedModelError("Mamba layers are supported with hidden_act silu only")
    rank = config["mamba_dt_rank"]
    return MambaSpec(
        num_channels=config["mamba_expand"] * config["hidden_size"],
        state_width=config["mamba_d_state"],
        time_rank=math.ceil(config["hidden_size"] / _WIDTHS_A_STEP) if rank == "auto" else rank,
        conv_taps=config["mamba_d_conv"],
        norm_eps=float(config["rms_norm_eps"]),
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
    )
