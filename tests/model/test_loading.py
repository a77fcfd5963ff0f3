"""Checkpoints are read in every layout, and an error in one is reported by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from moiety_engine.config import OffloadConfig
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.errors import ConfigError, UnsupportedModelError, WeightsError
from moiety_engine.model.families import read_spec, spec_from_config
from moiety_engine.model.loading import load_model
from moiety_engine.model.rope_spec import Llama3Scaling
from moiety_engine.model.spec import DenseSpec, MoeSpec
from moiety_engine.model.transformer import Transformer
from moiety_engine.model.transformer_options import TransformerOptions
from moiety_engine.model.weight_offload import named_tensors
from moiety_engine.model.weight_quantizer import bytes_in
from moiety_engine.model.weights import products_of
from moiety_kernels.quantization import QuantizedWeight
from moiety_wire.engine_choices import LoadFormat, Offload

PROMPT = list(range(3, 60))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_weights(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def mixture(make_checkpoint: Any) -> Any:
    return make_checkpoint("qwen3_moe")


def agrees(checkpoint: Any, make_driver: Any, make_sequence: Any) -> bool:
    logits = make_driver(checkpoint.folder).prefill(make_sequence(PROMPT), 64)
    return bool((logits.log_softmax(-1) - checkpoint.logprobs(PROMPT)).abs().max() < 1e-4)


def test_an_unknown_family_is_refused_with_the_known_ones(mixture: Any) -> None:
    edit_config(mixture.folder, model_type="mamba")
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*mistral3, mistral4, mixtral"):
        load_model(mixture.folder, device="cpu", dtype="auto")


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_spec(tmp_path)


def test_a_configuration_that_lacks_a_key_is_refused_by_name(mixture: Any) -> None:
    edit_config(mixture.folder, model_type="dots1", num_experts_per_tok=...)  # its class has no default of it
    with pytest.raises(ConfigError, match="of a dots1 model lacks the key 'num_experts_per_tok'"):
        read_spec(mixture.folder)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hidden_layers": "3"},
        {"num_hidden_layers": 2**64 - 1},
        {"rope_scaling": "yarn"},
        {"num_attention_heads": 0},
        {"quantization_config": "fp8"},
    ],
)
def test_a_configuration_with_a_value_that_cannot_be_is_refused(mixture: Any, wrong: dict[str, Any]) -> None:
    edit_config(mixture.folder, rope_parameters=..., **wrong)
    with pytest.raises(ConfigError, match="an invalid value"):
        read_spec(mixture.folder)


def test_a_model_type_that_is_no_text_is_refused(mixture: Any) -> None:
    edit_config(mixture.folder, model_type=["qwen3_moe"])
    with pytest.raises(ConfigError, match="is not a string"):
        read_spec(mixture.folder)


@pytest.mark.parametrize("kept", ["fp8", "int8"])
@pytest.mark.parametrize("variant", ["qwen3, tied", "deepseek_v2"])
def test_a_cache_in_eight_bits_is_refused_where_there_cannot_be_one(
    make_checkpoint: Any, variant: str, kept: str
) -> None:
    with pytest.raises(UnsupportedModelError, match="needs a GPU"):
        load_model(make_checkpoint(variant).folder, device="cpu", dtype="float32", kv_dtype=kept)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("variant", ["gpt_oss, experts as wide as blocks", "deepseek_v3, as wide as blocks"])
def test_random_weights_are_kept_in_few_bits_too(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, variant: str, form: str
) -> None:
    folder = make_checkpoint(variant).folder
    plain, narrow = (
        load_model(folder, device="cpu", dtype="bfloat16", quantization=asked, load_format=LoadFormat.DUMMY)
        for asked in ("auto", form)
    )
    products: Iterator[Tensor | QuantizedWeight] = products_of(narrow._weights)
    kept = [weight for weight in products if isinstance(weight, QuantizedWeight)]
    assert len(kept) == len(list(products_of(plain._weights)))
    assert {weight.format.name for weight in kept} == {form}
    rest = {id(one): one.nbytes for name, one in named_tensors(narrow._weights) if not name.startswith("head_VD")}
    wide_head = plain._weights.head_VD.nbytes
    assert sum(rest.values()) + wide_head == bytes_in(kept[0].format, narrow.spec, torch.bfloat16)
    ours, theirs = (type(make_driver(folder))(one).prefill(make_sequence(PROMPT), 7) for one in (narrow, plain))
    # Weights that have nothing to do with each other would differ by some 1.4; a token here and there changes experts.
    assert 0 < (ours - theirs).norm() < {"int8": 0.3, "fp8": 0.5, "int4": 0.9}[form] * theirs.norm()


def test_a_cache_in_bfloat16_goes_with_weights_in_bfloat16(mixture: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="--dtype bfloat16"):
        load_model(mixture.folder, device="cpu", dtype="float32", kv_dtype="bf16")
    model = load_model(mixture.folder, device="cpu", dtype="bfloat16", kv_dtype="bf16")
    assert model.kv_dtype is torch.bfloat16


def test_a_folder_without_weights_is_refused(mixture: Any) -> None:
    (mixture.folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="neither"):
        load_model(mixture.folder, device="cpu", dtype="auto")


def test_a_missing_tensor_is_named(mixture: Any) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    edit_weights(mixture.folder, lambda tensors: tensors.pop(name))
    with pytest.raises(WeightsError, match=rf"lacks {re.escape(name)}"):
        load_model(mixture.folder, device="cpu", dtype="auto")


def test_an_unexpected_tensor_is_named(mixture: Any) -> None:
    edit_weights(mixture.folder, lambda tensors: tensors.update({"model.layers.0.mlp.extra": torch.ones(2)}))
    with pytest.raises(WeightsError, match=r"unexpected model\.layers\.0\.mlp\.extra"):
        load_model(mixture.folder, device="cpu", dtype="auto")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(mixture: Any) -> None:
    edit_weights(mixture.folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight .*\(65,\).*\(64,\)"):
        load_model(mixture.folder, device="cpu", dtype="auto")


def test_a_file_cut_short_is_refused(mixture: Any) -> None:
    path = mixture.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(WeightsError, match="not a complete safetensors file"):
        load_model(mixture.folder, device="cpu", dtype="auto")


def test_shards_are_read_and_progress_reaches_the_whole(mixture: Any, make_driver: Any, make_sequence: Any) -> None:
    mixture.oracle.save_pretrained(mixture.folder, max_shard_size="400KB")
    (mixture.folder / "model.safetensors").unlink()
    assert len(list(mixture.folder.glob("model-*.safetensors"))) > 2
    seen: list[tuple[int, int]] = []
    load_model(mixture.folder, device="cpu", dtype="auto", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 100_000
    assert agrees(mixture, make_driver, make_sequence)


@pytest.mark.parametrize(
    "variant",
    [
        *("qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "granitemoe", "phimoe", "ernie4_5_moe", "glm4_moe"),
        *("dots1", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "minimax_m2", "sarvam_moe"),
        *("afmoe", "jamba", "kolibri1", "laguna", "lfm2_moe", "nemotron_h"),
        *("qwen3_5_moe", "qwen3_next"),
    ],
)
def test_experts_may_be_stacked_and_fused(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, variant: str
) -> None:
    checkpoint = make_checkpoint(variant)
    state = {name: tensor.clone() for name, tensor in checkpoint.oracle.state_dict().items()}
    assert any(name.endswith(("experts.gate_up_proj", "experts.up_proj")) for name in state)
    save_file(state, checkpoint.folder / "model.safetensors")
    assert agrees(checkpoint, make_driver, make_sequence)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("mixtral", "block_sparse_moe.experts.0.w1.weight"),
        ("phimoe", "block_sparse_moe.experts.0.w1.weight"),
        ("granitemoe", "block_sparse_moe.input_linear.weight"),
        ("granitemoeshared", "shared_mlp.input_linear.weight"),
        ("hy_v3", "mlp.router.gate.weight"),
        ("minimax_m2", "block_sparse_moe.e_score_correction_bias"),
        ("sarvam_moe", "attention.query_key_value.weight"),
        ("kolibri1", "moe.router.expert_bias"),
        ("laguna", "mlp.experts.e_score_correction_bias"),
        ("afmoe", "mlp.router.gate.weight"),
        ("axk1", "post_mlp_layernorm.weight"),
        ("dbrx", "ffn.experts.mlp.w1"),
        ("ernie4_5_moe", "mlp.moe_statics.e_score_correction_bias"),
        ("lfm2_moe", "feed_forward.experts.0.w1.weight"),
        ("nemotron_h", "mixer.experts.0.up_proj.weight"),
    ],
)
def test_some_families_are_written_with_names_of_their_own(make_checkpoint: Any, variant: str, name: str) -> None:
    names = load_file(make_checkpoint(variant).folder / "model.safetensors")
    layers = {"dbrx": "transformer.blocks", "nemotron_h": "backbone.layers"}.get(variant, "model.layers")
    assert f"{layers}.1.{name}" in names


@pytest.mark.parametrize(
    ("variant", "drafting", "unknown"),
    [
        ("glm4_moe", "model.layers.2.eh_proj.weight", "model.eh_proj.weight"),
        ("ernie4_5_moe", "model.mtp_linear_proj.0.weight", "model.mtq_linear_proj.0.weight"),
    ],
)
def test_layers_that_draft_tokens_are_left_on_disk(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, variant: str, drafting: str, unknown: str
) -> None:
    checkpoint = make_checkpoint(variant)
    edit_weights(checkpoint.folder, lambda tensors: tensors.update({drafting: torch.ones(2)}))
    assert agrees(checkpoint, make_driver, make_sequence)
    edit_weights(checkpoint.folder, lambda tensors: tensors.update({unknown: torch.ones(2)}))
    with pytest.raises(WeightsError, match=rf"unexpected {re.escape(unknown)}"):
        load_model(checkpoint.folder, device="cpu", dtype="auto")


def test_tensors_of_other_parts_are_ignored_with_one_line(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any
) -> None:
    checkpoint = make_checkpoint("llama, llama3 rope")
    others = ["mtp.fc.weight", "model.layers.3.self_attn.q_proj.weight", "vision_tower.patch.weight"]
    bias = "model.layers.0.self_attn.o_proj.bias"  # GPTQ's tools write biases of zeros
    edit_weights(checkpoint.folder, lambda tensors: tensors.update({name: torch.ones(2) for name in others}))
    edit_weights(checkpoint.folder, lambda tensors: tensors.update({bias: torch.zeros(64)}))
    with capture_logs() as logs:
        assert agrees(checkpoint, make_driver, make_sequence)
    (line,) = (one for one in logs if one["event"] == "tensors_ignored")
    assert (line["first"], line["num_tensors"]) == (bias, 4)
    edit_weights(checkpoint.folder, lambda tensors: tensors.update({bias: torch.ones(64)}))
    with pytest.raises(WeightsError, match=rf"unexpected {re.escape(bias)}"):
        load_model(checkpoint.folder, device="cpu", dtype="auto")


def test_keys_of_the_original_releases_mean_the_same(mixture: Any, make_driver: Any, make_sequence: Any) -> None:
    config = json.loads((mixture.folder / "config.json").read_text())
    edit_config(
        mixture.folder,
        rope_theta=config["rope_parameters"]["rope_theta"],
        rope_parameters=...,
        rope_scaling=None,
        num_experts=config.get("num_local_experts", config.get("num_experts")),
        num_local_experts=...,
        torch_dtype="float32",
        dtype=...,
    )
    assert agrees(mixture, make_driver, make_sequence)


def test_configuration_values_are_read_into_the_spec() -> None:
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "vocab_size": 100,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 128,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "rope_theta": 500.0,
        "rope_scaling": {
            "type": "llama3",
            "factor": 8,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 512,
        },
        "torch_dtype": "bfloat16",
    }
    spec = spec_from_config(config)
    assert [type(layer.ffn) for layer in spec.layers] == [DenseSpec, MoeSpec, DenseSpec, DenseSpec]
    assert spec.moe_layers == (1,)
    assert spec.checkpoint_dtype == "bfloat16"
    rope = spec.layers[0].attention.rope
    assert (rope.theta, rope.rotary_width, rope.scaling) == (500.0, 16, Llama3Scaling(8.0, 1.0, 4.0, 512))
    with pytest.raises(UnsupportedModelError, match="'spiral'"):
        spec_from_config(config | {"rope_scaling": {"type": "spiral"}})
    with pytest.raises(ConfigError, match="num_experts_per_tok 9"):
        spec_from_config(config | {"num_experts_per_tok": 9})
    with pytest.raises(UnsupportedModelError, match="'relu2' is not supported; known: silu, gelu_pytorch_tanh"):
        spec_from_config(config | {"hidden_act": "relu2"})
    with pytest.raises(ConfigError, match="experts must divide into groups"):
        spec_from_config(config | {"model_type": "glm4_moe", "first_k_dense_replace": 0, "n_group": 3})


@pytest.mark.parametrize("kernel", ["triton", "reference"])
def test_experts_are_computed_by_what_was_asked_for(
    kernel: str, mixture: Any, make_driver: Any, make_sequence: Any
) -> None:
    auto, asked = make_driver(mixture.folder), make_driver(mixture.folder, moe_kernel=kernel)
    sequences = [make_sequence(PROMPT[:9]) for _ in range(2)]
    ours, theirs = asked.prefill(sequences[0], 8), auto.prefill(sequences[1], 8)
    assert (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max() < 1e-4


def test_unavailable_moe_kernels_are_refused_with_the_reason(mixture: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"--moe-kernel grouped .* bfloat16, and activations are float32"):
        load_model(mixture.folder, device="cpu", dtype="bfloat16", moe_kernel="grouped")
    with pytest.raises(UnsupportedModelError, match="'cutlass' is not known; choose one of auto, triton, grouped"):
        load_model(mixture.folder, device="cpu", dtype="auto", moe_kernel="cutlass")


@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v3"])
def test_cache_bytes_are_what_the_cache_takes(make_checkpoint: Any, variant: str) -> None:
    model = load_model(make_checkpoint(variant).folder, device="cpu", dtype="bfloat16")
    assert model.dtype is torch.bfloat16
    for one in (model, Transformer(model.spec, model._weights, TransformerOptions(torch.int8))):
        taken = sum(t.numel() * t.element_size() for layer in one.allocate_kv(7, 16).layers for t in layer.parts)
        assert taken == 7 * one.kv_bytes_per_block(16)


def test_experts_that_have_no_weights_are_not_offloaded(make_checkpoint: Any, tmp_path: Path) -> None:
    offload = OffloadConfig(what=Offload.EXPERTS, folder=str(tmp_path))
    with pytest.raises(InvalidConfig, match="--offload is not available for longcat_flash"):
        load_model(make_checkpoint("longcat_flash").folder, device="cpu", dtype="auto", offload=offload)
