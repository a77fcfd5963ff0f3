"""Ling 2.0, without a class in transformers: its layers are those of Sarvam, with groups and partly rotated heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.families import ignored_keys, read_spec, spec_from_config

from .conftest import Checkpoint, write_checkpoint
from .recent_variants import RECENT_VARIANTS

PROMPT = [3 + (i * i * 31 + i * 7) % 370 for i in range(300)]
# config.json of inclusionAI/Ling-mini-2.0, narrower and with fewer layers
PUBLISHED: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "model_type": "bailing_moe",
    "moe_intermediate_size": 32,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 4,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 600_000,
    "rotary_dim": 16,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "vocab_size": 384,
}


@pytest.fixture(scope="module")
def ling(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("ling")
    family, settings = RECENT_VARIANTS["sarvam_moe"]
    groups = {"n_routed_experts": 16, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}
    rope = {"rope_type": "default", "rope_theta": 600_000.0, "partial_rotary_factor": 0.5}
    checkpoint = write_checkpoint(
        folder, "ling", variants={"ling": (family, settings | groups | {"rope_parameters": rope})}
    )
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    return checkpoint


@pytest.mark.parametrize("chunk", [7, 64])
def test_a_published_configuration_is_the_model_of_its_weights(
    ling: Checkpoint, make_driver: Any, make_sequence: Any, chunk: int
) -> None:
    logits = make_driver(ling.folder).prefill(make_sequence(PROMPT), chunk)
    assert (logits.log_softmax(-1) - ling.logprobs(PROMPT)).abs().max() <= 1e-4
    assert ignored_keys(ling.folder) == []


def test_the_rotated_part_is_a_share_or_a_width(ling: Checkpoint) -> None:
    expected = read_spec(ling.folder)
    without = {key: value for key, value in PUBLISHED.items() if key != "partial_rotary_factor"}
    assert spec_from_config(without) == expected
    assert spec_from_config(PUBLISHED | {"rotary_dim": 32}) == expected
    assert spec_from_config(without | {"rotary_dim": 32}).layers[0].attention.rope.rotary_width == 32


def test_the_same_under_the_name_of_its_version(ling: Checkpoint) -> None:
    versioned = spec_from_config(PUBLISHED | {"model_type": "bailing_moe_v2"})
    assert versioned.layers == read_spec(ling.folder).layers


@pytest.mark.parametrize("change", [{"score_function": "softmax"}, {"norm_head": True}, {"use_rmsnorm": False}])
def test_unsupported_settings_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(change))):
        spec_from_config(PUBLISHED | change)


def test_its_layer_of_multi_token_prediction_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | {"num_nextn_predict_layers": 1}))
    spec = read_spec(tmp_path)
    assert spec.mtp == spec.layers[1]
    assert spec.ignored_prefixes == ("model.layers.2.",)
