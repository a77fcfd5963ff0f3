"""What a config.json leaves out means what it means to transformers' configuration class of its family."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from moiety_engine.model.errors import ModelError
from moiety_engine.model.families import FAMILIES, spec_from_config
from moiety_engine.model.families.defaults import DEFAULTS, VISION_DEFAULTS
from moiety_engine.model.families.other_names import OTHER_NAMES
from moiety_engine.model.spec import MoeSpec

from .conftest import CLASS_OF, LINEAR_ROPE, LLAMA3_ROPE, SMALL, VARIANTS, WITHOUT_CLASS, YARN_ROPE

Config = dict[str, Any]
# a derived value is compared where it is used: in the spec
DERIVED = {"rope_theta", "rope_local_base_freq", "rope_parameters", "partial_rotary_factor", "sliding_window_pattern"}
DERIVED |= {"sliding_window", "moe_layer_end_index", "mamba_d_head", "mamba_dt_rank"}
# families whose text model has a part of the configuration only
NESTED = {"qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"}
TEXT_CLASSES = {"gemma3": "gemma3_text", "qwen3_vl_moe": "qwen3_vl_moe_text"}
TEXT_CLASSES |= {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"} | CLASS_OF
# families that were never released with other rotary parameters than one set for each kind of layer
BY_KIND = {"deepseek_v4", "gemma4_text", "laguna", "mellum", "mimo_v2_flash"}
KINDS = ({"full_attention", "sliding_attention"}, {"main", "compress"})
WITHOUT_POSITIONS = {"jamba", "kimi_linear", "nemotron_h"}
BASED = {"cohere2_moe"}  # families whose class takes no rotary parameters without a base
BY_LAYER = {"gemma4_text": {"head_dim"}}  # keys that a class gives for each layer alone
WHOLE_KEYS = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings")


def text_class(family: str) -> Any:
    return CONFIG_MAPPING[TEXT_CLASSES.get(family, family)]


def theirs(family: str, config: Config) -> Config:
    """The configuration with every key as transformers understands it. Raises what its class raises."""
    said = {key: value for key, value in config.items() if key != "model_type"}
    return {**text_class(family)(**said).to_dict(), "model_type": family}


def outcome(config: Config) -> Any:
    """The spec, or "refused"; anything but a ModelError fails the test."""
    try:
        return spec_from_config(config)
    except ModelError as exc:
        assert "'NoneType'" not in str(exc), exc
        return "refused"


def as_first_released(config: Config) -> Config:
    """The same with `rope_theta` and `rope_scaling`, as before transformers 5."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    if "full_attention" in rope:
        full, local = dict(rope["full_attention"]), rope["sliding_attention"]
        old["rope_local_base_freq"] = local["rope_theta"]
        rope = full
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return old


def without_each_key(config: Config) -> list[tuple[str, Config]]:
    """(what was left out, the rest), for each key and each key of rotary parameters."""
    made = [(key, {other: value for other, value in config.items() if other != key}) for key in config]
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, dict):
            made += [
                (f"{name}.{key}", config | {name: {other: value for other, value in rope.items() if other != key}})
                for key in rope
            ]
    return [(key, rest) for key, rest in made if key != "model_type"]


def full(name: str) -> tuple[str, Config]:
    family, changes = VARIANTS[name]
    return family, theirs(family, SMALL | changes)


ROPES = {"llama": LLAMA3_ROPE, "yarn": YARN_ROPE, "linear": LINEAR_ROPE}


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_key_that_is_left_out_means_what_transformers_takes_it_for(name: str, form: str) -> None:
    family, config = full(name)
    if form == "rope_scaling" and family in WITHOUT_POSITIONS:
        assert "rope_parameters" not in config
        return
    if form == "rope_scaling" and family in BY_KIND:
        assert config["rope_parameters"].keys() in KINDS
        return
    if form == "rope_scaling":
        config = as_first_released(config)
        assert "rope_parameters" not in config
    assert spec_from_config(config) == spec_from_config(theirs(family, config)), "nothing is left out yet"
    tried = 0
    for key, rest in without_each_key(config):
        try:
            meant = theirs(family, rest)
        except Exception:
            outcome(rest)  # is a spec, or refused by name
            continue
        assert outcome(rest) == outcome(meant), key
        tried += 1
    assert tried >= len(DEFAULTS[family])


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - NESTED - WITHOUT_CLASS))
def test_a_configuration_that_says_nothing_is_the_class_as_it_is(family: str) -> None:
    assert outcome({"model_type": family}) == outcome(theirs(family, {}))


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize(
    "family",
    sorted(
        FAMILIES.keys()
        - {"bailing_hybrid", "gemma3", "gemma3_text", "granitemoehybrid", "phimoe"}
        - WITHOUT_POSITIONS
        - BASED
        - NESTED
        - BY_KIND
        - WITHOUT_CLASS
    ),
)
def test_scaled_rotary_embeddings_have_the_family_s_own_base(family: str, kind: str) -> None:
    scaling = {key: value for key, value in ROPES[kind].items() if key != "rope_theta"}
    sizes = {"num_experts_per_tok": 2, "n_routed_experts": 8} if family in ("dots1", "deepseek_v2") else {}
    sizes |= {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2} if family == "lfm2_moe" else {}
    sizes |= {"intermediate_size": 1664} if family == "aria_text" else {}  # its class has square experts: refused
    for key in ("rope_scaling", "rope_parameters"):
        config = {"model_type": family, key: scaling, "max_position_embeddings": 4096, **sizes}
        spec = spec_from_config(config)
        assert spec == spec_from_config(theirs(family, config))
        assert spec.ropes[0].theta == text_class(family).default_theta


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - WITHOUT_CLASS))
def test_every_default_is_that_of_transformers(family: str) -> None:
    config, whole = text_class(family)(), CONFIG_MAPPING[CLASS_OF.get(family, family)]()
    for key in DEFAULTS[family].keys() - DERIVED - BY_LAYER.get(family, set()):
        source = whole if family in NESTED and key in WHOLE_KEYS else config
        assert getattr(source, key) == DEFAULTS[family][key], key
    for key, others in OTHER_NAMES.get(family, {}).items():
        names = {key, *others}
        assert {*type(config).attribute_map.items()} & {(a, b) for a in names for b in names}, key


def test_every_default_of_a_vision_encoder_is_that_of_transformers() -> None:
    config = CONFIG_MAPPING["qwen3_vl_moe"]().vision_config
    for key, value in VISION_DEFAULTS.items():
        theirs_value = getattr(config, key)
        assert (list(theirs_value) if isinstance(value, list) else theirs_value) == value, key
    assert config.rope_parameters["rope_theta"] == 10_000.0


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "rope_theta"])
def test_a_nested_text_configuration_means_what_transformers_takes_it_for(key: str) -> None:
    text = {"num_hidden_layers": 3, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}}
    text |= {key: 8, "num_attention_heads": 16, "num_experts_per_tok": 2}
    config = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {"out_hidden_size": 2048}}
    meant = CONFIG_MAPPING["qwen3_vl_moe"](**{name: part for name, part in config.items() if name != "model_type"})
    assert spec_from_config(config) == spec_from_config(meant.to_dict())


def test_the_same_count_under_another_name_is_not_overruled_by_a_default() -> None:
    for family, names in ((family, names) for family, names in OTHER_NAMES.items() if family not in NESTED):
        for key, others in names.items():
            for other in others if key not in ("layer_types", "layers_block_type") else ():
                counts = {"num_experts": 24} if "moe_topk" in names else {"n_routed_experts": 24}
                config = {"model_type": family, "num_experts_per_tok": 3} | counts | {other: 16}
                config = {name: value for name, value in config.items() if name != key}
                assert spec_from_config(config) == spec_from_config(theirs(family, config)), (family, other)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3"])
@pytest.mark.parametrize("use", [{}, {"use_sliding_window": False}])
def test_layer_types_with_a_window_that_is_not_used_are_refused(family: str, use: Config) -> None:
    layers: Config = {"num_hidden_layers": 2, "sliding_window": 40}
    config = {"model_type": family, **layers, **use}
    sliding, mixed = ["sliding_attention"] * 2, ["full_attention", "sliding_attention"]
    for kinds in (sliding, mixed):
        assert outcome(config | {"layer_types": kinds}) == "refused"
        with pytest.raises(ModelError, match=r"sets sliding_attention for layer \d.*use_sliding_window"):
            spec_from_config(config | {"layer_types": kinds})
    spec = spec_from_config(config | {"layer_types": ["full_attention"] * 2})
    assert [layer.attention.window for layer in spec.layers] == [None, None]
    used = spec_from_config(config | {"layer_types": mixed, "use_sliding_window": True})
    assert [layer.attention.window for layer in used.layers] == [None, 40]


def test_as_many_layer_types_as_layers_are_asked_for() -> None:
    config = {"model_type": "gpt_oss", "num_hidden_layers": 3, "layer_types": ["full_attention"] * 2}
    with pytest.raises(ModelError, match="2 layer_types for 3 num_hidden_layers"):
        spec_from_config(config)


def test_a_model_without_a_layer_with_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="all 2 layers of this granitemoehybrid model are recurrent"):
        spec_from_config({"model_type": "granitemoehybrid", "layer_types": ["mamba"] * 2, "num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit \[0.0, 0.1\] is not supported"),
        ({"mamba_d_head": 32}, "mamba_n_heads 128 × mamba_d_head 32 must be mamba_expand × hidden_size, 8192"),
        ({"layer_types": ["mamba", "moe"]}, "layer type 'moe' is not supported in granitemoehybrid"),
    ],
)
def test_mamba_2_layers_that_would_be_computed_wrongly_are_refused(changes: Config, match: str) -> None:
    config = {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "num_hidden_layers": 2}
    with pytest.raises(ModelError, match=match):
        spec_from_config(config | changes)


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
