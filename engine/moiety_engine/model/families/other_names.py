"""Other names of config.json keys per family, which transformers' configuration classes accept too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moiety_engine.model.families.config import Config

# Other names that a family's class accepts for a key of `DEFAULTS`, by that key: transformers' `attribute_map`.
_SARVAM_NAMES = {
    "n_routed_experts": ("num_local_experts", "num_experts"),
    "n_shared_experts": ("num_shared_experts",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
}
_KIMI_NAMES: dict[str, tuple[str, ...]] = {
    "max_position_embeddings": ("model_max_length",),
    "n_group": ("num_expert_group",),
    "n_shared_experts": ("num_shared_experts",),
    "norm_topk_prob": ("moe_renormalize",),
    "num_experts_per_tok": ("num_experts_per_token",),
    "num_local_experts": ("num_experts",),
}
OTHER_NAMES: dict[str, Mapping[str, tuple[str, ...]]] = {
    "axk1": {"n_routed_experts": ("num_local_experts",)},
    "bailing_hybrid": _KIMI_NAMES | {"num_mtp_layers": ("num_nextn_predict_layers",)},
    "dbrx": {
        "hidden_size": ("d_model",),
        "max_position_embeddings": ("max_seq_len",),
        "num_attention_heads": ("n_heads",),
        "num_hidden_layers": ("n_layers",),
    },
    "deepseek_v2": {"n_routed_experts": ("num_experts",)},
    "deepseek_v3": {"n_routed_experts": ("num_local_experts",), "num_nextn_predict_layers": ("num_mtp_layers",)},
    "dots1": {"n_routed_experts": ("num_local_experts",)},
    "ernie4_5_moe": {"moe_num_experts": ("num_experts",), "moe_k": ("num_experts_per_tok",)},
    "flex_olmo": {"num_experts": ("num_local_experts",)},
    "glm4_moe_lite": {"n_routed_experts": ("num_local_experts",)},
    "glm4_moe": {"n_routed_experts": ("num_local_experts",), "num_nextn_predict_layers": ("num_mtp_layers",)},
    "granitemoehybrid": {"layer_types": ("layers_block_type",)},
    "gpt_oss": {"num_local_experts": ("num_experts",)},
    "hunyuan_v1_moe": {"num_experts": ("num_local_experts",), "moe_topk": ("num_experts_per_tok",)},
    "hy_v3": {"num_experts": ("num_local_experts",)},
    "jamba": {"num_experts": ("num_local_experts",)},
    "jetmoe": {"kv_channels": ("head_dim",)},
    "kimi_k2": {"n_routed_experts": ("num_local_experts",), "num_nextn_predict_layers": ("num_mtp_layers",)},
    "kimi_linear": _KIMI_NAMES,
    "kolibri1": {"num_experts": ("num_local_experts",)},
    "longcat_flash": {
        "expert_ffn_hidden_size": ("moe_intermediate_size",),
        "ffn_hidden_size": ("intermediate_size",),
        "moe_topk": ("num_experts_per_tok",),
        "n_routed_experts": ("num_local_experts",),
    },
    "mellum": {"num_experts": ("num_local_experts",)},
    "mistral4": {"n_routed_experts": ("num_local_experts",)},
    "mimo_v2_flash": {"n_routed_experts": ("num_local_experts",)},
    "minimax": {"num_local_experts": ("num_experts",)},
    "minimax_m2": {"num_local_experts": ("num_experts",)},
    "mixtral": {"num_local_experts": ("num_experts",)},
    "nemotron_h": {"layers_block_type": ("layer_types",), "n_routed_experts": ("num_local_experts",)},
    "olmoe": {"num_experts": ("num_local_experts",)},
    "qwen3_moe": {"num_experts": ("num_local_experts",)},
    "qwen3_vl_moe": {"num_experts": ("num_local_experts",)},
    "sarvam_mla": _SARVAM_NAMES,
    "sarvam_moe": _SARVAM_NAMES | {"attention_bias": ("use_qkv_bias",)},
    "solar_open": {"n_routed_experts": ("num_local_experts",)},
}


def under_own_names(config: Config, family: str) -> Config:
    """Return the configuration with the family's own name for each key that it has under another name.

    As in transformers, the other name takes precedence if both are present.
    """
    own = {other: key for key, others in OTHER_NAMES.get(family, {}).items() for other in others}
    renamed = {own[key]: value for key, value in config.items() if key in own}
    return {key: value for key, value in config.items() if key not in own} | renamed if renamed else config
