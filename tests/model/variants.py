"""Configurations of small checkpoints: each family in its variants."""

from __future__ import annotations

from typing import Any

from .recent_variants import RECENT_VARIANTS

SMALL: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}
MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5, 3.0, 4.0],
    "long_factor": [2.0, 3.0, 5.0, 9.0, 14.0, 20.0, 30.0, 48.0],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
LATENT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
}
# name: (family, what its configuration says beyond SMALL)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "qwen3_moe",
        MIXTURE | {"head_dim": 32, "moe_intermediate_size": 48, "intermediate_size": 96, "norm_topk_prob": True},
    ),
    "qwen3_moe, dense layers, biases, yarn": (
        "qwen3_moe",
        MIXTURE
        | {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "intermediate_size": 96,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}),
    "mixtral, sliding window": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 50},
    ),
    "olmoe": ("olmoe", MIXTURE | {"intermediate_size": 48, "num_key_value_heads": 4}),
    "olmoe, clipped, linear rope": (
        "olmoe",
        MIXTURE | {"intermediate_size": 48, "clip_qkv": 0.6, "norm_topk_prob": True, "rope_parameters": LINEAR_ROPE},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        MIXTURE
        | {
            "num_hidden_layers": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "intermediate_size": 96,
        }
        | {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 40},
    ),
    "granitemoe": (
        "granitemoe",
        {"num_hidden_layers": 2}
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48, "tie_word_embeddings": True}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "granite": (
        "granite",
        {"num_hidden_layers": 2, "intermediate_size": 96, "attention_bias": True, "mlp_bias": True}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "phimoe": (
        "phimoe",
        {"num_hidden_layers": 2}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48, "router_jitter_noise": 0.1}
        | {"attention_bias": True, "lm_head_bias": True, "rope_parameters": LONG_ROPE},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"num_hidden_layers": 2}
        | {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32, "intermediate_size": 96, "head_dim": 16}
        | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "use_bias": False},
    ),
    "glm4_moe": (
        "glm4_moe",
        {"num_hidden_layers": 2}
        | {
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        }
        | {"moe_intermediate_size": 32, "intermediate_size": 96, "head_dim": 32, "use_qk_norm": True}
        | {"attention_bias": True, "first_k_dense_replace": 1},
    ),
    "dots1": (
        "dots1",
        {"num_hidden_layers": 2, "n_routed_experts": 16, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        | {"moe_intermediate_size": 32, "intermediate_size": 96, "n_shared_experts": 2, "first_k_dense_replace": 1}
        | {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 40, "max_window_layers": 1}
        | {"head_dim": 32, "attention_bias": True},
    ),
    "qwen3_next": (
        "qwen3_next",
        MIXTURE
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "mlp_only_layers": [1]}
        | {"head_dim": 32, "intermediate_size": 96, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
        | {"linear_value_head_dim": 64, "norm_topk_prob": True, "initializer_range": 0.08},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        MIXTURE
        | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 32}
        | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 64}
        | {"initializer_range": 0.08},
    ),
    **RECENT_VARIANTS,
    "qwen3, tied": ("qwen3", {"head_dim": 32, "intermediate_size": 96, "tie_word_embeddings": True}),
    "llama, llama3 rope": ("llama", {"intermediate_size": 96, "rope_parameters": LLAMA3_ROPE}),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 2, "head_dim": 32, "intermediate_size": 96, "query_pre_attn_scalar": 48}
        | {"sliding_window": 40}
        | {"layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 4.0}
        | {"rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": {"rope_type": "default"}}},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        LATENT
        | {"q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENT
        | {
            "q_lora_rank": 48,
            "qk_rope_head_dim": 32,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
        }
        | {"attention_bias": True, "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}
        | {"head_dim": 32, "sliding_window": 40, "rope_parameters": YARN_ROPE | {"truncate": False}},
    ),
    "mistral, sliding window": (
        "mistral",
        {"num_hidden_layers": 1, "intermediate_size": 96, "head_dim": 32, "sliding_window": 40},
    ),
    "qwen2, windows in the upper layers": (
        "qwen2",
        {"num_hidden_layers": 2, "intermediate_size": 96, "use_sliding_window": True}
        | {"sliding_window": 50, "max_window_layers": 1},
    ),
    "llama, biases, odd widths": (
        "llama",
        {
            "num_hidden_layers": 1,
            "hidden_size": 60,
            "intermediate_size": 90,
            "head_dim": 10,
            "vocab_size": 379,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
}
QWEN2_MOE = (
    *MIXTURE,
    "num_hidden_layers",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "intermediate_size",
)
# families whose class is not in transformers; test_ling shows them
WITHOUT_CLASS = {"bailing_moe", "bailing_moe_v2"}
# families without a class in transformers of their own, by the family whose class it is
CLASS_OF = {"kimi_k2": "deepseek_v3"}
# classes that transformers' AutoModelForCausalLM does not know
NOT_AUTOMATIC = {"mistral4": "Mistral4ForCausalLM"}
# of use in some test only
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3, as wide as blocks": (
        "deepseek_v3",
        VARIANTS["deepseek_v3"][1] | {"q_lora_rank": 64, "moe_intermediate_size": 32, "intermediate_size": 96},
    ),
    **{
        f"{name}, as wide as blocks": (VARIANTS[name][0], VARIANTS[name][1] | {"moe_intermediate_size": 64})
        for name in ("qwen3_next", "qwen3_5_moe")
    },
    **{
        f"{name}, full attention last": (
            VARIANTS[name][0],
            VARIANTS[name][1]
            | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]}
            | {"mlp_only_layers": []},
        )
        for name in ("qwen3_next", "qwen3_5_moe")
    },
    "deepseek_v4, as wide as blocks": (
        "deepseek_v4",
        RECENT_VARIANTS["deepseek_v4"][1] | {"q_lora_rank": 64},
    ),
    "llama, llama3 rope of long models": (
        "llama",
        {"intermediate_size": 128, "num_hidden_layers": 2}
        | {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 8192}},
    ),
    "qwen2, no windows": ("qwen2", {"num_hidden_layers": 2, "intermediate_size": 96}),
    "qwen2_moe, no dense layers": ("qwen2_moe", {k: v for k, v in VARIANTS["qwen2_moe"][1].items() if k in QWEN2_MOE}),
    "deepseek_v3, no biases": (
        "deepseek_v3",
        VARIANTS["deepseek_v3"][1]
        | {"attention_bias": False, "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "exaone_moe, a dense last layer": (
        "exaone_moe",
        RECENT_VARIANTS["exaone_moe"][1]
        | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "dense"], "sliding_window": 1000},
    ),
    "mimo_v2_flash, a dense last layer": (
        "mimo_v2_flash",
        RECENT_VARIANTS["mimo_v2_flash"][1]
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "dense"], "sliding_window": 1000, "hidden_size": 96}
        | {"intermediate_size": 96},
    ),
    "gpt_oss, experts as wide as blocks": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96, "head_dim": 16},
    ),
}
