"""Keys that a config.json omits have the defaults of transformers' configuration class of the family."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from moiety_engine.model.errors import ModelError
from moiety_engine.model.families import FAMILIES, spec_from_config
from moiety_engine.model.families.defaults import DEFAULTS, VISION_DEFAULTS
from moiety_engine.model.families.other_names import OTHER_NAMES

from .transformers_configs import NESTED, Config, outcome, text_class, theirs
from .variants import CLASS_OF, LINEAR_ROPE, LLAMA3_ROPE, SMALL, VARIANTS, WITHOUT_CLASS, YARN_ROPE

# a derived value is compared where it is used: in the spec
DERIVED = {"rope_theta", "rope_local_base_freq", "rope_parameters", "partial_rotary_factor", "sliding_window_pattern"}
DERIVED |= {"sliding_window", "moe_layer_end_index", "mamba_d_head", "mamba_dt_rank"}
# families that were never released with other rotary parameters than one set for each kind of layer
BY_KIND = {"deepseek_v4", "gemma4_text", "laguna", "mellum", "mimo_v2_flash", "zaya"}
KINDS = ({"full_attention", "sliding_attention"}, {"main", "compress"}, {"hybrid", "hybrid_sliding"})
WITHOUT_POSITIONS = {"jamba", "kimi_linear", "nemotron_h"}
BASED = {"cohere2_moe"}  # families whose class takes no rotary parameters without a base
BY_LAYER = {"gemma4_text": {"head_dim"}}  # keys that a class gives for each layer alone
WHOLE_KEYS = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings")


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
