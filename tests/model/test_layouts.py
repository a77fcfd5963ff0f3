"""Quantized checkpoints, text models within multimodal ones and configurations as first released are read correctly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor
from transformers import CONFIG_MAPPING

from moiety_engine.model.checkpoint import load
from moiety_engine.model.errors import ConfigError, UnsupportedModelError
from moiety_engine.model.families import FAMILIES, ignored_keys, read_spec, spec_from_config
from moiety_engine.model.rope_spec import LinearScaling, YarnScaling
from moiety_engine.model.weight_offload import weight_bytes
from moiety_engine.model.weight_quantizer import as_packed_for_a_gpu, bytes_in
from moiety_kernels.cpu import paths
from moiety_kernels.quantization import MXFP4, QuantizedWeight, dequantize

from .variants import CLASS_OF, SMALL, VARIANTS, WITHOUT_CLASS

PROMPT = list(range(3, 90))


def logprobs(make_driver: Any, make_sequence: Any, folder: Path) -> Tensor:
    logits: Tensor = make_driver(folder).prefill(make_sequence(PROMPT), 64)
    return logits.log_softmax(-1)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def say_quantized(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | {"quantization_config": settings}))


def test_experts_in_four_bits_are_what_transformers_makes_of_them(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = put_experts_in_four_bits(make_checkpoint("gpt_oss, experts as wide as blocks"))
    with capture_logs() as lines:
        ours = logprobs(make_driver, make_sequence, checkpoint.folder)
    (said,) = [line for line in lines if line["event"] == "checkpoint_widened"]
    assert (said["stored_as"], said["reason"]) == (
        "mxfp4",
        "no kernel reads it: --dtype float32 requires exact products",
    )
    assert (ours - checkpoint.logprobs(PROMPT)).abs().max() <= 1e-4
    kept, wide = (make_driver(checkpoint.folder, dtype="bfloat16", quantization=name) for name in ("auto", "none"))
    assert isinstance(kept.model._weights.layers[0].ffn.down_EDF, QuantizedWeight)
    of_kept, of_wide = (driver.prefill(make_sequence(PROMPT), 64) for driver in (kept, wide))
    # sums in another order where four bits are multiplied as they lie, and in the same where they are widened first
    assert (of_kept - of_wide).norm() <= 1e-3 * of_wide.norm()
    monkeypatch.setattr(paths, "is_usable", lambda path: path is paths.FLOATS)
    of_kept, of_wide = (driver.prefill(make_sequence(PROMPT), 64) for driver in (kept, wide))
    assert torch.equal(of_kept, of_wide)


def test_experts_in_four_bits_stay_so_for_who_reads_them_and_all_else_is_wide(make_checkpoint: Any) -> None:
    folder = put_experts_in_four_bits(make_checkpoint("gpt_oss, experts as wide as blocks")).folder
    spec = read_spec(folder)
    assert spec.weight_format is MXFP4
    wide = load(folder, spec, device=torch.device("cpu"), dtype=torch.bfloat16)
    narrow = load(folder, spec, device=torch.device("cpu"), dtype=torch.bfloat16, form=MXFP4)
    for ours, theirs in zip(narrow.layers, wide.layers, strict=True):
        for name in ("gate_up_E2FD", "down_EDF"):
            kept, plain = getattr(ours.ffn, name), getattr(theirs.ffn, name)
            assert isinstance(kept, QuantizedWeight)
            assert torch.equal(dequantize(kept), plain.float())
        assert torch.equal(ours.attention.qkv_CD, theirs.attention.qkv_CD)
    kept_bytes, wide_bytes = bytes_in(MXFP4, spec, torch.bfloat16), weight_bytes(spec, torch.bfloat16)
    counts: list[int] = [layer.ffn.gate_up_E2FD.numel() + layer.ffn.down_EDF.numel() for layer in wide.layers]
    experts = sum(counts)
    assert wide_bytes - kept_bytes == experts * 2 - experts * 5 // 8


def test_experts_are_packed_for_a_gpu_where_they_are_as_wide_as_its_packs(make_checkpoint: Any) -> None:
    config = config_of(make_checkpoint("gpt_oss, experts as wide as blocks").folder)
    assert as_packed_for_a_gpu(MXFP4, spec_from_config(config | {"intermediate_size": 64})) == replace(MXFP4, pack=64)
    assert as_packed_for_a_gpu(MXFP4, spec_from_config(config | {"intermediate_size": 96})) is None


def put_experts_in_four_bits(checkpoint: Any) -> Any:
    """The checkpoint with random mxfp4 for its experts, on disk and in transformers' model."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(checkpoint.folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(122, 126, blocks.shape[:-1], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        weight = convert_moe_packed_tensors(blocks, exponents, dtype=torch.bfloat16)
        checkpoint.oracle.get_parameter(name).data.copy_(weight)
    save_file(tensors, checkpoint.folder / "model.safetensors")
    say_quantized(checkpoint.folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return checkpoint


def test_quantized_weights_dequantize_to_bfloat16_by_default(make_checkpoint: Any) -> None:
    config = config_of(make_checkpoint("gpt_oss").folder) | {"quantization_config": {"quant_method": "mxfp4"}}
    assert spec_from_config(config).checkpoint_dtype == "float32"
    assert spec_from_config(config | {"dtype": None}).checkpoint_dtype == "bfloat16"


def test_unknown_quantizations_are_refused_with_the_list_of_known_ones(make_checkpoint: Any) -> None:
    config = config_of(make_checkpoint("qwen3, tied").folder)
    with pytest.raises(UnsupportedModelError, match=r"GPTQ.*supported are fp8.*mxfp4.*compressed-tensors"):
        spec_from_config(config | {"quantization_config": {"quant_method": "gptq"}})


@pytest.mark.parametrize("layout", ["as saved", "as held in memory"])
def test_the_text_part_of_a_model_that_also_sees_is_served(
    make_driver: Any, make_sequence: Any, tmp_path: Path, layout: str
) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(1)
    text = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
    }
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=383)
    oracle = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    oracle.save_pretrained(tmp_path)
    if layout == "as held in memory":
        state = {name: tensor.clone() for name, tensor in oracle.state_dict().items() if name != "lm_head.weight"}
        assert "model.language_model.embed_tokens.weight" in state
        save_file(state, tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert (logprobs(make_driver, make_sequence, tmp_path) - expected).abs().max() <= 1e-4


def test_a_gemma_as_first_released_says_little_and_means_the_same() -> None:
    from transformers import Gemma3TextConfig

    released: dict[str, Any] = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 12,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    theirs = Gemma3TextConfig(**{key: value for key, value in released.items() if key != "model_type"})
    spec = spec_from_config({"model_type": "gemma3", "text_config": released})
    written = spec_from_config(theirs.to_dict())
    assert spec.layers == written.layers
    assert spec.tie_word_embeddings
    assert [layer.attention.window for layer in spec.layers] == [1024] * 5 + [None] + [1024] * 5 + [None]
    rope = spec.layers[5].attention.rope
    assert (rope.theta, rope.scaling) == (1e6, LinearScaling(8.0))
    assert (spec.layers[0].attention.rope.theta, spec.layers[0].attention.rope.scaling) == (1e4, None)


def test_a_deepseek_as_first_released_means_the_same(make_checkpoint: Any) -> None:
    config = config_of(make_checkpoint("deepseek_v3").folder)
    spec = spec_from_config(config)
    assert isinstance(spec.layers[0].attention.rope.scaling, YarnScaling)
    rope = config.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    assert spec_from_config(config | {"rope_theta": theta, "rope_scaling": rope | {"type": kind}}) == spec


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"hidden_activation": "relu"}, "'relu'.*gelu_pytorch_tanh"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "'noaux_tc'.*group_limited_greedy"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' .* deepseek_v2; known: softmax"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' .* deepseek_v3; known: sigmoid"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("mistral, sliding window", {"hidden_act": "relu"}, "'relu'.*gelu_pytorch_tanh"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported in gpt_oss"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias without a q_lora_rank"),
        ("glm_moe_dsa", {"q_lora_rank": None}, "sparse attention needs a q_lora_rank"),
        ("glm_moe_dsa", {"layer_types": ["full_attention"] * 3}, "'full_attention' .* known: indexed_attention"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave False .* known: True"),
        ("glm_moe_dsa", {"model_type": "hy_v4"}, "it needs several residual streams .* behind the gateway"),
        ("deepseek_v4", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' .* deepseek_v4; known: sqrtsoftplus"),
        ("deepseek_v4", {"n_shared_experts": 2}, "n_shared_experts 2 is not supported in deepseek_v4"),
        ("deepseek_v4", {"layer_types": ["full_attention"] * 4}, "'full_attention' .* known: sliding_attention, "),
        ("deepseek_v4", {"layer_types": ["sliding_attention"] * 4}, "all 4 layers of this deepseek_v4 model are"),
        ("deepseek_v4", {"mlp_layer_types": ["dense"] * 4}, "'dense' is not supported .* known: hash_moe, moe"),
    ],
)
def test_unknown_settings_of_a_family_are_refused_by_name(
    make_checkpoint: Any, variant: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        spec_from_config(config_of(make_checkpoint(variant).folder) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o_groups": 3}, "num_attention_heads 4 is not a multiple of o_groups 3"),
        ({"index_head_dim": 8}, "16 rotated entries must be .* index_head_dim 8"),
        ({"index_topk": 0}, "index_topk 0 must be at least 1"),
        ({"compress_rates": {"compressed_sparse_attention": 4}}, "None for heavily_compressed_attention"),
        ({"hc_mult": 0}, "hc_mult 0 must be in 1 … 16"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters 0 must be at least 1"),
    ],
)
def test_a_deepseek_v4_that_cannot_be_is_refused(make_checkpoint: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_from_config(config_of(make_checkpoint("deepseek_v4").folder) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_head_dim": 8}, "index_head_dim 8 must be at least qk_rope_head_dim 16"),
        ({"index_topk": 0}, "index_topk 0 must be at least 1"),
        ({"indexer_types": ["shared", "full", "full"]}, "full for the first"),
        ({"indexer_types": ["full"]}, "one for each layer"),
    ],
)
def test_an_indexer_that_cannot_select_is_refused(make_checkpoint: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_from_config(config_of(make_checkpoint("glm_moe_dsa").folder) | change)


def test_ignored_keys_of_a_configuration_are_exactly_the_unread_ones(tmp_path: Path) -> None:
    nested = {"gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"}  # the last is tried in test_vision
    dense = {"qwen3_5_text"}  # as qwen3_5_moe_text, but for its feed-forwards
    assert {family for family, _ in VARIANTS.values()} == FAMILIES.keys() - nested - dense - WITHOUT_CLASS, (
        "each is tried"
    )
    for family, changes in VARIANTS.values():
        config = CONFIG_MAPPING[CLASS_OF.get(family, family)](**(SMALL | changes)).to_dict() | {"model_type": family}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert ignored_keys(tmp_path) == [], family
        more = {"attention_twist": 2, "another_twist": False, "router_aux_loss_coef": 0.1}
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        assert ignored_keys(tmp_path) == ["attention_twist"], family


@pytest.mark.parametrize(
    "harmless",
    [
        {"_model_name_or_path": "org/base", "_name_or_path": "base", "_commit_hash": "0a1b"},
        {"_attn_implementation_autoset": True, "unsloth_version": "2026.1", "unsloth_fixed": True},
        {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}, "use_bfloat16": True},
        {"do_sample": True, "max_new_tokens": 64, "task_specific_params": {"chat": {}}, "output_attentions": True},
    ],
)
def test_the_origin_the_software_and_the_sampling_of_a_checkpoint_are_not_warned_of(
    tmp_path: Path, harmless: dict[str, Any]
) -> None:
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "max_position_embeddings", "intermediate_size"), 64)
    config = {"model_type": "llama", **sizes, "num_hidden_layers": 1, "num_attention_heads": 2, **harmless}
    (tmp_path / "config.json").write_text(json.dumps(config | {"_attention_twist": 2}))
    assert ignored_keys(tmp_path) == ["_attention_twist"]


def test_a_window_that_is_not_used_is_no_matter_and_one_that_a_family_does_not_know_is_named(tmp_path: Path) -> None:
    for family, use, ignored in (("qwen2", False, []), ("llama", True, ["sliding_window", "use_sliding_window"])):
        sizes = dict.fromkeys(("vocab_size", "hidden_size", "max_position_embeddings", "intermediate_size"), 64)
        layers = {
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "sliding_window": 16,
            "use_sliding_window": use,
        }
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **sizes, **layers}))
        assert ignored_keys(tmp_path) == ignored
