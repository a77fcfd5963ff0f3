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
    "afmoe": _SHARED | {
        "global_attn_every_n_layers": 4, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 16_384, "moe_intermediate_size": 1408, "mup_enabled": False,
        "num_attention_heads": 16, "num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6,
        "num_hidden_layers": 32, "num_shared_experts": 2, "rms_norm_eps": 1e-5, "route_scale": 1.0,
        "sliding_window": 1024, "vocab_size": 200_192,
    },
    "axk1": _SHARED | {
        "hidden_size": 7168, "intermediate_size": 18_432, "kv_lora_rank": 512, "max_position_embeddings": 32_768,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 192, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_interleave": True,
        "routed_scaling_factor": 2.5, "topk_group": 4, "v_head_dim": 128, "vocab_size": 163_840,
    },
    "exaone_moe": {
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 16_384,
        "max_position_embeddings": 2048, "moe_intermediate_size": 1024, "n_group": 1, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "num_shared_experts": 1, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5,
        "sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": False, "topk_group": 1,
        "vocab_size": 102_400, "rope_theta": 10_000.0,
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
    "granitemoe_swa": _SHARED | {
        "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "hidden_size": 4096, "intermediate_size": 11_008,
        "logits_scaling": 1.0, "max_position_embeddings": 2048, "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_local_experts": 8, "residual_multiplier": 1.0, "shared_intermediate_size": 0,
        "sliding_window": 128, "vocab_size": 32_000,
    },
    "granitemoehybrid": _SHARED | {
        "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "hidden_size": 4096, "intermediate_size": 11_008,
        "logits_scaling": 1.0, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": "auto", "mamba_d_state": 256,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
        "max_position_embeddings": 2048, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_local_experts": 8, "residual_multiplier": 1.0, "shared_intermediate_size": 1024, "vocab_size": 32_000,
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
    "kimi_linear": {
        "attention_bias": False, "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216,
        "kv_lora_rank": 512, "linear_conv_kernel_dim": 4, "linear_head_dim": 128, "linear_num_heads": 32,
        "max_position_embeddings": 1_048_576, "moe_intermediate_size": 1024, "n_group": 1, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 8, "num_hidden_layers": 27,
        "num_local_experts": 256, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
        "v_head_dim": 128, "vocab_size": 163_840,
    },
    "kolibri1": {
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "max_position_embeddings": 262_144,
        "moe_intermediate_size": 512, "norm_topk_prob": False, "num_attention_heads": 48, "num_experts": 384,
        "num_experts_per_tok": 6, "num_hidden_layers": 50, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "shared_expert_intermediate_size": 512, "sliding_window": 513, "tie_word_embeddings": False,
        "vocab_size": 128_000, "rope_theta": 10_000.0,
    },
    "laguna": _SHARED | {
        "gating": True, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 131_072, "moe_apply_router_weight_on_input": False, "moe_intermediate_size": 512,
        "moe_routed_scaling_factor": 1.0, "moe_router_logit_softcapping": 0.0, "num_attention_heads": 48,
        "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "shared_expert_intermediate_size": 512, "vocab_size": 100_352, "sliding_window": 512,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
    },
    "mellum": _SHARED | {
        "head_dim": 128, "hidden_size": 2304, "max_position_embeddings": 131_072, "moe_intermediate_size": 896,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 98_304, "sliding_window": 1024,
        "intermediate_size": 7168,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "minimax": {
        "full_attn_alpha_factor": 1, "full_attn_beta_factor": 1, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14_336, "linear_attn_alpha_factor": 1, "linear_attn_beta_factor": 1,
        "max_position_embeddings": 131_072, "mlp_alpha_factor": 1, "mlp_beta_factor": 1, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "vocab_size": 32_000, "rope_theta": 1_000_000.0,
    },
    "minimax_m2": {
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
        "max_position_embeddings": 196_608, "num_attention_heads": 48, "num_experts_per_tok": 8,
        "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "vocab_size": 200_064, "rope_theta": 5_000_000.0,
    },
    "mistral4": _SHARED | {
        "first_k_dense_replace": 0, "hidden_size": 4096, "kv_lora_rank": 256, "max_position_embeddings": 1_048_576,
        "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 4, "num_hidden_layers": 36,
        "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "rope_interleave": True,
        "routed_scaling_factor": 1.0, "topk_group": 1, "v_head_dim": 128, "vocab_size": 131_072,
        "intermediate_size": 12_288,
        "rope_parameters": {
            "type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
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
