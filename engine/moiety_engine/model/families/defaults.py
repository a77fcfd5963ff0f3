"""Default values of config.json keys per family, equal to those of transformers' class for the `model_type`.

A config.json may omit every key whose value is the default of the class that wrote it. `DEFAULTS` therefore has a value
for each key that a family's reader looks up and that its class has a default for. Keys without an entry are derived
from others (`layer_types`, `head_dim`), are off when absent, or have no default; a reader then rejects a config.json
without them and names the key. `tests/model/test_defaults.py` compares every entry with transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.families.recent_defaults import RECENT_DEFAULTS

if TYPE_CHECKING:
    from moiety_engine.model.families.config import Config

_SHARED: Config = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0}
_LLAMA: Config = _SHARED | {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
_GRANITE: Config = _LLAMA | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_MISTRAL: Config = _SHARED | {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
_QWEN: Config = _SHARED | {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_MIXTURE: Config = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
_QWEN_NEXT: Config = _SHARED | {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_3_5: Config = _QWEN_NEXT | {"vocab_size": 248_320, "num_hidden_layers": 32}
_QWEN_3_5_MIXTURE: Config = {
    "num_hidden_layers": 40,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
_GEMMA: Config = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}

# Of Ling's class, which is published with the checkpoints, and whose config.json files state what is not here.
_LING: Config = _SHARED | {
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": False,
}
DEFAULTS: dict[str, Config] = RECENT_DEFAULTS | {
    "bailing_moe": _LING,
    "bailing_moe_v2": _LING,
    "deepseek_v2": _LLAMA
    | {
        "vocab_size": 102_400,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
    },
    "deepseek_v3": _SHARED
    | {
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "attention_bias": False,
        "num_nextn_predict_layers": 1,
    },
    "dots1": _SHARED
    | {
        "vocab_size": 152_064,
        "hidden_size": 4608,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    "ernie4_5_moe": _SHARED
    | {
        "vocab_size": 103_424,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
        "use_bias": False,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    "gemma3": _GEMMA,
    "gemma3_text": _GEMMA,
    "glm4_moe": _SHARED
    | {
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
    },
    "gpt_oss": _SHARED
    | {
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    },
    "granite": _GRANITE,
    "granitemoe": {key: value for key, value in _GRANITE.items() if key != "mlp_bias"}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "llama": _LLAMA,
    "mistral": _MISTRAL | {"sliding_window": 4096},
    "mixtral": _MISTRAL
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    "olmoe": _SHARED
    | {
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
    },
    "phimoe": _SHARED
    | {
        "vocab_size": 32_064,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
        "num_local_experts": 16,
        "router_jitter_noise": 0.01,
        "attention_bias": False,
        "lm_head_bias": False,
    },
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN
    | _QWEN_MIXTURE
    | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "qkv_bias": True,
    },
    "qwen3": _QWEN | {"head_dim": 128, "attention_bias": False},
    "qwen3_moe": {key: value for key, value in _QWEN.items() if key != "max_window_layers"}
    | _QWEN_MIXTURE
    | {
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    "qwen3_5": _QWEN_3_5 | {"hidden_size": 4096, "intermediate_size": 12_288, "num_key_value_heads": 4},
    "qwen3_5_moe": _QWEN_3_5 | _QWEN_3_5_MIXTURE,
    "qwen3_5_moe_text": _QWEN_3_5 | _QWEN_3_5_MIXTURE,
    "qwen3_5_text": _QWEN_3_5 | {"hidden_size": 4096, "intermediate_size": 12_288, "num_key_value_heads": 4},
    "qwen3_next": _QWEN_NEXT
    | {
        "vocab_size": 151_936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    "qwen3_vl_moe": _SHARED
    | {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128_000,
        "rope_theta": 500_000.0,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "image_token_id": 151_655,
        "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653,
    },
}
# The same for the configuration of a vision encoder: transformers' Qwen3VLMoeVisionConfig.
VISION_DEFAULTS: Config = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def filled(config: Config, family: str) -> Config:
    """Return the configuration, which has the family's own names, with the default for each absent key.

    A null is kept, except for rotary parameters, where the classes treat null as absent.
    """
    absent = {key: value for key, value in DEFAULTS[family].items() if key not in config}
    if config.get("rope_parameters") is None and "rope_parameters" in DEFAULTS[family]:
        absent["rope_parameters"] = DEFAULTS[family]["rope_parameters"]
    return config | absent
