"""Configurations as they are published are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moiety_engine.model.errors import ModelError
from moiety_engine.model.families import ignored_keys, spec_from_config
from moiety_engine.model.spec import AttentionSpec, MoeSpec

from .transformers_configs import Config, theirs


def test_kimi_linear_is_read_as_it_is_published() -> None:
    own = {"num_heads": 16, "head_dim": 64, "short_conv_kernel_size": 3}
    lists = {"kda_layers": [1, 2, 4], "full_attn_layers": [3]}
    counts = {"num_experts": 24, "num_experts_per_token": 4, "model_max_length": 4096, "num_expert_group": 2}
    config = {"model_type": "kimi_linear", "num_hidden_layers": 4, "linear_attn_config": own | lists, **counts}
    spec = spec_from_config(config | {"first_k_dense_replace": 2})
    assert spec == spec_from_config(theirs("kimi_linear", config | {"first_k_dense_replace": 2}))
    assert (spec.recurrent_layers, spec.moe_layers, spec.max_context_tokens) == ((0, 1, 3), (2, 3), 4096)
    twice = config | {"linear_attn_config": own | lists | {"full_attn_layers": [3, 4]}}
    with pytest.raises(ModelError, match="must name layer 4 in exactly one of its lists"):
        spec_from_config(twice)


RELEASED_V4: Config = {  # as DeepSeek-V4 is released, with fewer layers
    "model_type": "deepseek_v4",
    "num_hidden_layers": 6,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "num_hash_layers": 2,
    "qk_rope_head_dim": 64,
    "head_dim": 512,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10_000,
    "compress_rope_theta": 160_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65_536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"compress_rate_csa": 8, "compress_rate_hca": 64},
        {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 32}},
        {"compress_ratios": None},
        {"num_hash_layers": 0, "qk_rope_head_dim": 32},
        {"mlp_layer_types": ["moe", "hash_moe"] * 3},
        {"partial_rotary_factor": 0.25},
    ],
)
def test_deepseek_v4_as_it_is_released_is_read_as_transformers_reads_it(change: Config) -> None:
    config = RELEASED_V4 | change
    spec = spec_from_config(config)
    assert spec == spec_from_config(theirs("deepseek_v4", config))
    assert len({layer.attention for layer in spec.layers}) == (3 if "compress_ratios" not in change else 2)


NEMOTRON_3_NANO = {  # its config.json as published
    "model_type": "nemotron_h",
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}


def test_nemotron_3_is_read_as_it_is_published() -> None:
    spec = spec_from_config(NEMOTRON_3_NANO)
    assert spec == spec_from_config(theirs("nemotron_h", NEMOTRON_3_NANO))
    assert (len(spec.layers), spec.num_stored_layers, len(spec.recurrent_layers)) == (29, 52, 23)
    assert [spec.block_starts[index] for index in range(4)] == [0, 2, 4, 5]
    assert [index for index, layer in enumerate(spec.layers) if layer.ffn is None] == [2, 6, 10, 14, 18, 23]
    listed = {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "moe_latent_size": 1024}
    spec = spec_from_config(NEMOTRON_3_NANO | listed)
    assert spec == spec_from_config(theirs("nemotron_h", NEMOTRON_3_NANO | listed))
    assert spec.has_latent_experts and spec.moe_layers == (0,)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hybrid_override_pattern": "M*X"}, "layer type 'X' is not supported in nemotron_h"),
        ({"hybrid_override_pattern": "-M*"}, r"layer 0 is a feed-forward \(mlp\) without a layer of Mamba-2 or"),
        ({"hybrid_override_pattern": "M*EE"}, r"layer 3 is a feed-forward \(moe\) without a layer of Mamba-2 or"),
        ({"hybrid_override_pattern": "MEM"}, "all 2 layers of this nemotron_h model are recurrent"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit \[0.0, 0.1\] is not supported"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported in nemotron_h"),
        ({"attention_bias": True}, "attention_bias True is not supported in nemotron_h"),
        ({"moe_latent_size": 1024, "mlp_bias": True}, "mlp_bias is not supported in nemotron_h with moe_latent_size"),
    ],
)
def test_nemotron_layers_that_would_be_computed_wrongly_are_refused(changes: Config, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        spec_from_config(NEMOTRON_3_NANO | changes)


LFM2_8B_A1B = {  # its config.json as published
    "model_type": "lfm2_moe",
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_embedding": True,
    "torch_dtype": "bfloat16",
    "use_expert_bias": True,
    "vocab_size": 65536,
}


def test_lfm2_is_read_as_it_is_published() -> None:
    spec = spec_from_config(LFM2_8B_A1B)
    assert spec == spec_from_config(theirs("lfm2_moe", LFM2_8B_A1B))
    assert (len(spec.recurrent_layers), len(spec.moe_layers), spec.tie_word_embeddings) == (18, 22, True)
    assert not spec_from_config(LFM2_8B_A1B | {"tie_embedding": False}).tie_word_embeddings
    with pytest.raises(ModelError, match="layer type 'linear_attention' is not supported in lfm2_moe"):
        spec_from_config(LFM2_8B_A1B | {"layer_types": ["conv", "linear_attention"], "num_hidden_layers": 2})
    without = {key: value for key, value in LFM2_8B_A1B.items() if key != "layer_types"}
    with pytest.raises(ModelError, match="lacks the key 'layer_types'"):
        spec_from_config(without)


LONGCAT_FLASH_CHAT = {  # its config.json as published
    "model_type": "longcat_flash",
    "attention_bias": False,
    "attention_method": "MLA",
    "expert_ffn_hidden_size": 2048,
    "ffn_hidden_size": 12288,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "moe_topk": 12,
    "n_routed_experts": 512,
    "num_attention_heads": 64,
    "num_layers": 28,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000.0,
    "routed_scaling_factor": 6.0,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 131072,
    "zero_expert_num": 256,
    "zero_expert_type": "identity",
}


def test_longcat_flash_is_read_as_it_is_published() -> None:
    spec = spec_from_config(LONGCAT_FLASH_CHAT)
    assert spec == spec_from_config(theirs("longcat_flash", LONGCAT_FLASH_CHAT))
    assert (len(spec.layers), spec.num_stored_layers, len(spec.moe_layers)) == (56, 28, 28)
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, MoeSpec)
    assert (ffn.num_experts, ffn.zero_experts, ffn.routing.num_experts) == (512, 256, 768)
    for changes, match in (
        ({"zero_expert_type": "drop"}, "zero_expert_type 'drop' is not supported in longcat_flash"),
        ({"router_bias": True}, "router_bias True is not supported in longcat_flash"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora False is not supported in longcat_flash"),
        ({"q_lora_rank": None}, "q_lora_rank null is not supported in longcat_flash"),
    ):
        with pytest.raises(ModelError, match=match):
            spec_from_config(LONGCAT_FLASH_CHAT | changes)


JAMBA_1_5_MINI = {  # its config.json as published
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_mamba_kernels": True,
    "vocab_size": 65536,
}


def test_jamba_is_read_as_it_is_published() -> None:
    spec = spec_from_config(JAMBA_1_5_MINI)
    assert spec == spec_from_config(theirs("jamba", JAMBA_1_5_MINI))
    assert (len(spec.recurrent_layers), len(spec.moe_layers)) == (28, 16)
    assert spec == spec_from_config(JAMBA_1_5_MINI | {"mamba_dt_rank": "auto"})
    assert spec_from_config(JAMBA_1_5_MINI | {"num_experts": 1, "num_experts_per_tok": 1}).moe_layers == ()
    for changes, match in (
        ({"attn_layer_offset": 8}, "attn_layer_offset 8 must be less than attn_layer_period 8"),
        ({"mamba_inner_layernorms": False}, "mamba_inner_layernorms False is not supported in jamba"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "Mamba layers are supported with hidden_act silu only"),
    ):
        with pytest.raises(ModelError, match=match):
            spec_from_config(JAMBA_1_5_MINI | changes)


DBRX_INSTRUCT: Config = {  # its config.json as published
    "model_type": "dbrx",
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
    "d_model": 6144,
    "emb_pdrop": 0.0,
    "ffn_config": {
        "ffn_hidden_size": 10752,
        "model_type": "",
        "moe_jitter_eps": 0.01,
        "moe_loss_weight": 0.05,
        "moe_num_experts": 16,
        "moe_top_k": 4,
    },
    "initializer_range": 0.02,
    "max_seq_len": 32768,
    "n_heads": 48,
    "n_layers": 40,
    "output_router_logits": False,
    "resid_pdrop": 0.0,
    "router_aux_loss_coef": 0.05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 100352,
}


def test_dbrx_is_read_as_it_is_published(tmp_path: Path) -> None:
    spec = spec_from_config(DBRX_INSTRUCT)
    assert spec == spec_from_config(theirs("dbrx", DBRX_INSTRUCT)), "with the base that transformers adds"
    assert (len(spec.moe_layers), spec.max_context_tokens, spec.hidden_size) == (40, 32768, 6144)
    attention, ffn = spec.layers[0].attention, spec.layers[0].ffn
    assert isinstance(attention, AttentionSpec) and isinstance(ffn, MoeSpec)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.clip) == (48, 8, 128, 8)
    assert attention.rope.theta == 500_000
    assert (ffn.width, ffn.routing.num_experts, ffn.routing.top_k, ffn.routing.renormalize) == (10752, 16, 4, True)
    for part, key, value, match in (
        ("ffn_config", "moe_normalize_expert_weights", 2, "moe_normalize_expert_weights 2 is not supported"),
        ("ffn_config", "ffn_act_fn", {"name": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("attn_config", "kv_n_heads", 7, "num_attention_heads 48 is not a multiple of num_key_value_heads 7"),
    ):
        with pytest.raises(ModelError, match=match):
            spec_from_config(DBRX_INSTRUCT | {part: DBRX_INSTRUCT[part] | {key: value}})
    with pytest.raises(ModelError, match="tie_word_embeddings is not possible in a dbrx model"):
        spec_from_config(DBRX_INSTRUCT | {"tie_word_embeddings": True})
    odd = DBRX_INSTRUCT | {"attn_config": DBRX_INSTRUCT["attn_config"] | {"twist": 3}}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    assert ignored_keys(tmp_path) == ["twist"]


FALCON_H1_0_5B: Config = {  # its config.json as published
    "model_type": "falcon_h1",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "vocab_size": 32784,
}


def test_falcon_h1_is_read_as_it_is_published(tmp_path: Path) -> None:
    spec = spec_from_config(FALCON_H1_0_5B)
    assert spec == spec_from_config(theirs("falcon_h1", FALCON_H1_0_5B))
    assert (spec.recurrent_layers, spec.num_stored_layers) == (tuple(range(0, 72, 2)), 36)
    attention = spec.layers[1].attention
    assert isinstance(attention, AttentionSpec) and attention.rope.theta == 1e11
    assert (attention.scale, attention.value_scale) == (0.390625 / 8, 0.9375)
    (tmp_path / "config.json").write_text(json.dumps(FALCON_H1_0_5B))
    assert ignored_keys(tmp_path) == []
    for changes, match in (
        ({"attention_bias": True}, "attention_bias with attention_in_multiplier 1.0 and attention_out_multiplier"),
        ({"mlp_bias": True}, "mlp_bias with mlp_multipliers"),
        ({"mamba_proj_bias": True}, "projectors_bias False is not supported in falcon_h1; known: True"),
        ({"mamba_proj_bias": True, "projectors_bias": True}, "ssm_in_multiplier 1.25 is not supported in falcon_h1"),
        ({"mamba_n_heads": 32}, "mamba_n_heads 32 × mamba_d_head 64 must be mamba_d_ssm 1536"),
        ({"ssm_multipliers": [1.0, 2.0]}, "must have 5 numbers"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp False is not supported in falcon_h1"),
    ):
        with pytest.raises(ModelError, match=match):
            spec_from_config(FALCON_H1_0_5B | changes)
