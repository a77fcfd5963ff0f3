"""Default values of config.json keys of the families released since the autumn of 2025; see `defaults`."""

from __future__ import annotations

from typing import Any

_SHARED: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
RECENT_DEFAULTS: dict[str, dict[str, Any]] = {
    "axk1": _SHARED | {
        "hidden_size": 7168, "intermediate_size": 18_432, "kv_lora_rank": 512, "max_position_embeddings": 32_768,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 192, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_interleave": True,
        "routed_scaling_factor": 2.5, "topk_group": 4, "v_head_dim": 128, "vocab_size": 163_840,
    },
    "flex_olmo": _SHARED | {
        "hidden_size": 4096, "intermediate_size": 11_008, "max_position_embeddings": 4096, "norm_topk_prob": False,
        "num_attention_heads": 32, "num_experts": 7, "num_experts_per_tok": 5, "num_hidden_layers": 32,
        "vocab_size": 100_352, "rope_theta": 500_000.0,
    },
    "glm4_moe_lite": _SHARED | {
        "hidden_size": 2048, "intermediate_size": 10_240, "kv_lora_rank": 512, "max_position_embeddings": 202_752,
        "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_interleave": True, "routed_scaling_factor": 1.8, "topk_group": 1, "v_head_dim": 256,
        "vocab_size": 154_880,
    },
    "granitemoeshared": _SHARED | {
        "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "hidden_size": 4096, "intermediate_size": 11_008,
        "logits_scaling": 1.0, "max_position_embeddings": 2048, "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_local_experts": 8, "residual_multiplier": 1.0, "shared_intermediate_size": 0,
        "vocab_size": 32_000,
    },
    "hunyuan_v1_moe": _SHARED | {
        "hidden_size": 4096, "intermediate_size": 11_008, "max_position_embeddings": 2048, "moe_topk": 1,
        "num_attention_heads": 32, "num_experts": 1, "num_hidden_layers": 32, "rms_norm_eps": 1e-5,
        "vocab_size": 290_943,
    },
    "hy_v3": _SHARED | {
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 13_312, "max_position_embeddings": 131_072,
        "mlp_bias": False, "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_experts": 192,
        "num_experts_per_tok": 8, "num_hidden_layers": 80, "num_key_value_heads": 8, "num_shared_experts": 1,
        "rms_norm_eps": 1e-5, "router_scaling_factor": 2.826, "vocab_size": 120_832, "rope_theta": 11_158_840.0,
    },
    "kimi_k2": _SHARED | {
        "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18_432, "kv_lora_rank": 512,
        "max_position_embeddings": 4096, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rope_interleave": True, "routed_scaling_factor": 2.5, "topk_group": 4, "v_head_dim": 128,
        "vocab_size": 129_280, "num_nextn_predict_layers": 1,
    },
    "minimax_m2": {
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
        "max_position_embeddings": 196_608, "num_attention_heads": 48, "num_experts_per_tok": 8,
        "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "vocab_size": 200_064, "rope_theta": 5_000_000.0,
    },
    "sarvam_mla": _SHARED | {
        "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 16_384, "kv_lora_rank": 512,
        "max_position_embeddings": 4096, "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_interleave": True,
        "routed_scaling_factor": 2.5, "topk_group": 1, "v_head_dim": 128, "vocab_size": 262_144, "q_lora_rank": None,
    },
    "sarvam_moe": _SHARED | {
        "first_k_dense_replace": 1, "head_dim": 64, "hidden_size": 4096, "intermediate_size": 8192,
        "max_position_embeddings": 131_072, "moe_intermediate_size": 1024, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 6,
        "num_hidden_layers": 19, "num_key_value_heads": 4, "routed_scaling_factor": 2.5, "topk_group": 1,
        "use_qk_norm": True, "vocab_size": 262_144, "rope_theta": 8_000_000.0, "partial_rotary_factor": 1.0,
    },
    "solar_open": _SHARED | {
        "head_dim": 128, "hidden_size": 4096, "max_position_embeddings": 131_072, "moe_intermediate_size": 1280,
        "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0, "topk_group": 1, "vocab_size": 196_608,
        "rope_theta": 1_000_000.0,
    },
}  # fmt: skip
