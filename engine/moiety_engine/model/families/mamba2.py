"""Mamba-2 layers of the families whose configurations name their sizes `mamba_*` (Falcon-H1, Granite 4.0)."""

from __future__ import annotations

from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families.config import Config, read_activation, require_unlimited_time_steps
from moiety_engine.model.recurrent_specs import Mamba2Spec
from moiety_kernels.moe.activation import SILU


def read_mamba2(config: Config, inner: int, inner_name: str) -> Mamba2Spec:
    """Return the layer, whose heads have the width `inner` together; `inner_name` says what gives it.

    Raises ConfigError and UnsupportedModelError.
    """
    heads, groups, width = config["mamba_n_heads"], config["mamba_n_groups"], config["mamba_d_head"]
    width = inner // heads if width == "auto" else width
    if heads * width != inner or heads % groups:
        raise ConfigError(
            f"mamba_n_heads {heads} × mamba_d_head {width} must be {inner_name}{inner}, and mamba_n_heads a multiple "
            f"of mamba_n_groups {groups}"
        )
    if read_activation(config) != SILU:
        raise UnsupportedModelError("Mamba-2 layers are supported with hidden_act silu only")
    require_unlimited_time_steps(config, "time_step_limit")
    return Mamba2Spec(
        num_heads=heads,
        num_groups=groups,
        head_width=width,
        state_width=config["mamba_d_state"],
        conv_taps=config["mamba_d_conv"],
        norm_eps=float(config["rms_norm_eps"]),
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
        is_one_group=groups == 1,
    )
