"""Variants of the families released since the autumn of 2025; see VARIANTS in variants.py."""

from __future__ import annotations

from typing import Any

_LATENT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_experts_per_tok": 3,
}
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_SIGMOID: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "head_dim": 32,
}

_BY_KIND = {
    "full_attention": _DEEPSEEK_YARN | {"partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
_OF_V4 = ["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"] * 2][:4]
_WINDOWS = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}

_FALCON: dict[str, Any] = {
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "head_dim": 32,
    "mamba_d_state": 48,
    "mamba_d_conv": 3,
    "mamba_d_head": 32,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.7,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
}

RECENT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": (
        "afmoe",
        _SIGMOID
        | _WINDOWS
        | {"num_experts": 8, "num_dense_layers": 1, "route_scale": 1.5, "mup_enabled": True, "attention_bias": True},
    ),
    "aria_text": (
        "aria_text",
        {"num_hidden_layers": 2, "moe_num_experts": 8, "moe_topk": 3, "intermediate_size": 48, "attention_bias": True}
        | {"pad_token_id": None},
    ),
    "axk1": (
        "axk1",
        _LATENT | {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "rope_parameters": _DEEPSEEK_YARN},
    ),
    "axk2": (
        "axk2",
        _LATENT
        | {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "mlp_layer_types": ["dense", "sparse"]}
        | {"index_topk": 24, "index_head_dim": 32, "index_n_heads": 16, "gated_norm_rank": 16},
    ),
    "dbrx": (
        "dbrx",
        {"num_hidden_layers": 2, "d_model": 64, "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.6, "rope_theta": 500.0}}
        | {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 3}}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "deepseek_v32": (
        "deepseek_v32",
        _LATENT
        | {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "attention_bias": True}
        | {"q_lora_rank": 64, "index_topk": 24, "index_head_dim": 32, "index_n_heads": 16}
        | {"rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek_v4": (
        "deepseek_v4",
        {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16}
        | {"layer_types": _OF_V4, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "sliding_window": 24}
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}}
        | {"o_groups": 2, "o_lora_rank": 16, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 8}
        | {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "swiglu_limit": 0.6}
        | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
    ),
    "cohere2_moe": (
        "cohere2_moe",
        {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48, "head_dim": 32}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "prefix_dense_intermediate_size": 96}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 40}
        | {"num_shared_experts": 2, "expert_selection_fn": "sigmoid", "attention_bias": True, "logit_scale": 0.5},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        _LATENT
        | {"num_hidden_layers": 3, "num_local_experts": 12, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 64}
        | {"short_conv_kernel_size": 3, "pad_token_id": None, "num_mtp_layers": 0}
        | {"kda_lower_bound": -2.0},  # with -5 transformers' own two forms of the recurrence are 9e-5 apart
    ),
    "exaone_moe": (
        "exaone_moe",
        _SIGMOID | _WINDOWS | {"num_experts": 12, "n_group": 3, "topk_group": 2},
    ),
    "falcon_h1": (
        "falcon_h1",
        _FALCON
        | {"mamba_n_groups": 2, "mamba_rms_norm": True, "attention_in_multiplier": 1.2, "mamba_d_ssm": None}
        | {"mamba_n_heads": 4, "mamba_d_head": "auto"},
    ),
    "falcon_h1, no norms": (
        "falcon_h1",
        _FALCON | {"mamba_n_groups": 1, "mamba_rms_norm": False, "mamba_d_ssm": 96, "mamba_n_heads": 3},
    ),
    "flex_olmo": (
        "flex_olmo",
        {"num_hidden_layers": 2, "num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 48}
        | {"num_key_value_heads": 2, "attention_bias": True, "pad_token_id": None},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        _LATENT | {"q_lora_rank": 64, "n_routed_experts": 12, "n_shared_experts": 2, "attention_bias": True},
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        _LATENT
        | {"num_hidden_layers": 3, "q_lora_rank": 64, "n_routed_experts": 12, "first_k_dense_replace": 1}
        | {"index_topk": 24, "index_head_dim": 48, "index_n_heads": 18, "indexer_types": ["full", "shared", "full"]},
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}
        | _WINDOWS
        | {"shared_intermediate_size": 64, "layer_rope_theta": [500.0, 0], "attention_multiplier": 0.2},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48, "shared_intermediate_size": 64}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "attention_bias": True}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0}
        | {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 48, "mamba_expand": 4, "mamba_proj_bias": True}
        | {"rms_norm_eps": 1e-5},
    ),
    "granitemoehybrid, dense": (
        "granitemoehybrid",
        {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 80, "num_hidden_layers": 2}
        | {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"}
        | {"mamba_n_heads": 8, "mamba_d_state": 32, "mamba_conv_bias": False, "tie_word_embeddings": True},
    ),
    "granitemoeshared": (
        "granitemoeshared",
        {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}
        | {"shared_intermediate_size": 64, "attention_bias": True, "logits_scaling": 2.0}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {"num_hidden_layers": 2, "num_experts": 8, "moe_topk": [3, 3], "intermediate_size": 48, "head_dim": 32}
        | {"attention_bias": True}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}},
    ),
    "hy_v3": (
        "hy_v3",
        _SIGMOID | {"num_experts": 8, "num_shared_experts": 2, "attention_bias": True, "mlp_bias": True},
    ),
    "jamba": (
        "jamba",
        {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0}
        | {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48, "mamba_expand": 3}
        | {"mamba_d_conv": 3, "mamba_dt_rank": 48, "mamba_d_state": 32, "mamba_proj_bias": True},
    ),
    "jetmoe": (
        "jetmoe",
        {"num_hidden_layers": 2, "num_local_experts": 6, "num_experts_per_tok": 3, "kv_channels": 32}
        | {"intermediate_size": 48, "rms_norm_eps": 1e-3, "num_attention_heads": 6},
    ),
    "kimi_k2": (
        "kimi_k2",
        _LATENT
        | {"n_routed_experts": 12, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {"routed_scaling_factor": 2.827, "rope_parameters": _DEEPSEEK_YARN},
    ),
    "kimi_linear": (
        "kimi_linear",
        _LATENT
        | {"q_lora_rank": None, "num_hidden_layers": 3, "num_local_experts": 12, "n_group": 3, "topk_group": 2}
        | {"linear_num_heads": 4, "linear_head_dim": 64, "linear_conv_kernel_dim": 3, "pad_token_id": None}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "kolibri1": (
        "kolibri1",
        _SIGMOID | _WINDOWS | {"num_experts": 8, "shared_expert_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "laguna": (
        "laguna",
        _SIGMOID
        | _WINDOWS
        | {"num_experts": 8, "shared_expert_intermediate_size": 48, "moe_routed_scaling_factor": 2.5}
        | {"num_attention_heads_per_layer": [4, 6], "attention_bias": True, "rope_parameters": _BY_KIND},
    ),
    "laguna, a gate for each value": (
        "laguna",
        _SIGMOID | {"num_experts": 8, "shared_expert_intermediate_size": 48, "gating": "per-element"},
    ),
    "gemma4_text": (
        "gemma4_text",
        _WINDOWS
        | {"num_hidden_layers": 2, "head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 2}
        | {"num_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
        | {"intermediate_size": 96, "final_logit_softcapping": 4.0, "attention_bias": True},
    ),
    "gemma4_text, embeddings by layer": (  # E2B and E4B: the upper layers read the keys and values of lower ones
        "gemma4_text",
        {"sliding_window": 40, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 16}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"global_head_dim": 32, "num_key_value_heads": 2, "intermediate_size": 96, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 48, "vocab_size_per_layer_input": 384, "final_logit_softcapping": 4.0},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "conv_bias": True}
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "intermediate_size": 112}
        | {"routed_scaling_factor": 1.5, "conv_L_cache": 4, "head_dim": 32},
    ),
    "lfm2_moe, no biases": (
        "lfm2_moe",
        {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 0}
        | {"num_experts": 8, "moe_intermediate_size": 48, "use_expert_bias": False, "norm_topk_prob": False}
        | {"tie_word_embeddings": False},
    ),
    "llama4_text": (
        "llama4_text",
        {"num_hidden_layers": 4, "num_local_experts": 4, "intermediate_size": 48, "intermediate_size_mlp": 96}
        | {"head_dim": 32, "interleave_moe_layer_step": 2, "attention_chunk_size": 48, "no_rope_layer_interval": 2}
        | {"floor_scale": 32, "attention_bias": True, "pad_token_id": None},
    ),
    "longcat_flash": (
        "longcat_flash",
        {key: value for key, value in _LATENT.items() if "size" not in key and "tok" not in key and "layers" not in key}
        | {"num_layers": 2, "num_hidden_layers": 4, "head_dim": 16, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32}
        | {"n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 4, "routed_scaling_factor": 1.5},
    ),
    "mellum": (
        "mellum",
        _SIGMOID
        | _WINDOWS
        | {"num_experts": 8, "mlp_layer_types": ["sparse", "dense"], "attention_bias": True}
        | {"rope_parameters": {kind: dict(_BY_KIND[kind], partial_rotary_factor=1.0) for kind in _BY_KIND}},
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        _SIGMOID
        | {"num_hidden_layers": 4, "layer_types": ["full_attention", *["sliding_attention"] * 3], "sliding_window": 40}
        | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "head_dim": 48, "v_head_dim": 32}
        | {"attention_bias": True},
    ),
    "minimax": (
        "minimax",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48, "head_dim": 64, "block_size": 32}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "full_attn_alpha_factor": 1.7}
        | {"full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 0.6, "linear_attn_beta_factor": 1.3}
        | {"mlp_alpha_factor": 2.5, "mlp_beta_factor": 0.7},
    ),
    "minimax_m2": (
        "minimax_m2",
        {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}
        | {"head_dim": 32, "rotary_dim": 16},
    ),
    "mistral4": (
        "mistral4",
        _LATENT
        | {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
        | {"rope_parameters": _DEEPSEEK_YARN | {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.3}},
    ),
    "nemotron_h": (
        "nemotron_h",
        {"layers_block_type": [*("linear_attention", "moe") * 2, "linear_attention", "full_attention", "moe"]}
        | {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2}
        | {"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 80, "routed_scaling_factor": 2.5}
        | {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 48, "use_bias": True}
        | {"head_dim": 32},
    ),
    "nemotron_h, latent experts": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "moe_latent_size": 32}
        | {"n_routed_experts": 8, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 80}
        | {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32, "head_dim": 32},
    ),
    "nemotron_h, dense": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 32, "use_conv_bias": False}
        | {"intermediate_size": 112, "mlp_bias": True, "head_dim": 32},
    ),
    "sarvam_mla": (
        "sarvam_mla",
        _LATENT | {"q_lora_rank": None, "n_routed_experts": 12, "rope_parameters": _DEEPSEEK_YARN},
    ),
    "sarvam_moe": (
        "sarvam_moe",
        _SIGMOID | {"n_routed_experts": 8, "n_shared_experts": 2},
    ),
    "zaya": (
        "zaya",
        {"num_hidden_layers": 3, "num_experts": 6, "moe_intermediate_size": 48, "router_hidden_size": 32}
        | {"head_dim": 32, "sliding_window": 40, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"]}
        | {"lm_head_bias": True, "pad_token_id": None, "tie_word_embeddings": False},
    ),
    "solar_open": (
        "solar_open",
        _SIGMOID | {"n_routed_experts": 8, "attention_bias": True, "rope_parameters": _DEEPSEEK_YARN},
    ),
}
