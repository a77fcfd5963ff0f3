"""Checkpoints in float8 keep their very numbers from the file to the product, whatever has a scale: a block, a row or a
matrix; and the model is that of the weights they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from moiety_engine.model.errors import UnsupportedModelError, WeightsError
from moiety_engine.model.families import read_spec, spec_from_config
from moiety_engine.model.loading import load_model
from moiety_engine.model.weight_offload import weight_bytes
from moiety_engine.model.weight_quantizer import bytes_in
from moiety_kernels.quantization import QuantizedWeight

PROMPT = list(range(3, 90))
FAMILIES = ["deepseek_v3, as wide as blocks", "mixtral, sliding window", "ernie4_5_moe", "llama, llama3 rope"]
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
Block = tuple[int | None, int | None]  # rows and columns that have one scale; None for all


def in_float8(weight: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """A matrix and the scales of its blocks, those at the ends smaller. Of no block 448 is the largest number."""
    rows, columns = (side or size for side, size in zip(block, weight.shape, strict=True))
    scale = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    narrow = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i, some in enumerate(weight.split(rows)):
        for j, part in enumerate(some.split(columns, dim=1)):
            scale[i, j] = part.abs().max() / 300
            narrow[i * rows :, j * columns :][: part.shape[0], : part.shape[1]] = (part / scale[i, j]).to(narrow.dtype)
    return narrow, scale


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy} | more
    return COMPRESSED | {"config_groups": {"group_0": {"weights": weights, "input_activations": {"num_bits": 8}}}}


KINDS: dict[str, tuple[Block, str, dict[str, Any]]] = {
    "blocks": ((32, 32), "_scale_inv", {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "compressed blocks": ((16, 64), "_scale", compressed("block", block_structure=[16, 64])),
    "rows": ((1, None), "_scale", compressed("channel")),
    "matrices": ((None, None), "_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
}


def put_in_float8(folder: Path, kind: str, but: str = "lm_head") -> dict[str, Tensor]:
    """The checkpoint's matrices in float8, but for those with `but` in their names; what is on disk then."""
    block, end, settings = KINDS[kind]
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if weight.dim() == 2 and ("proj" in name or "experts." in name) and but not in name:
            narrow, scale = in_float8(weight, block)
            tensors |= {name: narrow, name + end: scale.view(()) if block == (None, None) else scale}
            if settings.get("activation_scheme") == "static":
                tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    say_quantized(folder, settings)
    return tensors


def say_quantized(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def layers(driver: Any) -> Any:
    return driver.model._weights.layers


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_in_float8_stays_so_and_is_the_model_of_the_weights_it_stands_for(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, variant: str, kind: str
) -> None:
    folder = make_checkpoint(variant).folder
    put_in_float8(folder, kind)
    kept, wide = (make_driver(folder, dtype="bfloat16", quantization=name) for name in ("auto", "none"))
    for ours, theirs in zip(layers(kept), layers(wide), strict=True):
        assert isinstance(ours.attention.output_DC, QuantizedWeight)
        assert ours.attention.output_DC.values_NK.dtype is torch.float8_e4m3fn
        assert isinstance(theirs.attention.output_DC, Tensor)
    of_kept, of_wide = (driver.prefill(make_sequence(PROMPT), 64) for driver in (kept, wide))
    assert torch.equal(of_kept, of_wide)
    assert torch.equal(of_kept, make_driver(folder, dtype="bfloat16").prefill(make_sequence(PROMPT), 1))


def test_its_numbers_and_scales_are_those_on_disk_and_it_takes_half_the_memory(
    make_checkpoint: Any, make_driver: Any
) -> None:
    folder = make_checkpoint("mixtral, sliding window").folder
    tensors = put_in_float8(folder, "blocks")
    kept = layers(make_driver(folder, dtype="bfloat16", quantization="fp8"))[0].ffn.down_EDF
    name = "model.layers.0.block_sparse_moe.experts.{}.w2.weight"
    for expert in range(4):
        narrow, scale = tensors[name.format(expert)], tensors[name.format(expert) + "_scale_inv"]
        assert torch.equal(kept.values_NK[expert].view(torch.uint8), narrow.view(torch.uint8))
        assert torch.equal(kept.scales_NG[expert][::32], scale)
        assert torch.equal(kept.scales_NG[expert][31::32], scale)
    spec = read_spec(folder)
    assert bytes_in(spec.weight_format, spec, torch.bfloat16) < 0.7 * weight_bytes(spec, torch.bfloat16)


def stack_experts(folder: Path, tensors: dict[str, Tensor]) -> None:
    """As transformers 5 holds them: all of a layer in one tensor, gate above up, and so their scales."""
    for layer in range(3):
        name = f"model.layers.{layer}.block_sparse_moe.experts."
        for end in ("weight", "weight_scale_inv"):
            w1, w3, w2 = (
                torch.stack([tensors.pop(f"{name}{expert}.{one}.{end}") for expert in range(4)])
                for one in ("w1", "w3", "w2")
            )
            suffix = end.removeprefix("weight")
            tensors |= {f"{name}gate_up_proj{suffix}": torch.cat((w1, w3), 1), f"{name}down_proj{suffix}": w2}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("rows", "keeps"), [(32, True), (128, False)])
def test_experts_stacked_on_disk_stay_so_where_gate_and_up_begin_with_blocks_of_their_own(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, monkeypatch: pytest.MonkeyPatch, rows: int, keeps: bool
) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [rows, 32]}
    monkeypatch.setitem(KINDS, "stacked", ((rows, 32), "_scale_inv", settings))
    folder = make_checkpoint("mixtral, sliding window").folder
    tensors = put_in_float8(folder, "stacked")
    if not keeps:  # one block has all 128 rows of gate and up
        for name in [name for name in tensors if ".w3." in name and name.endswith("scale_inv")]:
            tensors[name] = tensors[name][:0]
    stack_experts(folder, tensors)
    with capture_logs() as lines:
        kept = make_driver(folder, dtype="bfloat16")
    assert isinstance(layers(kept)[0].ffn.gate_up_E2FD, QuantizedWeight) is keeps
    assert [line["num_tensors"] for line in lines if line["event"] == "checkpoint_widened"] == ([] if keeps else [6])
    wide = make_driver(folder, dtype="bfloat16", quantization="none")
    of_kept, of_wide = (driver.prefill(make_sequence(PROMPT), 64) for driver in (kept, wide))
    assert torch.equal(of_kept, of_wide)


def test_gated_delta_layers_and_queries_with_gates_stay_in_float8(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any
) -> None:
    folder = make_checkpoint(
        "qwen3_next, as wide as blocks"
    ).folder  # published in float8 but for these small projections
    put_in_float8(folder, "blocks", but="in_proj_ba")
    kept, wide = (make_driver(folder, dtype="bfloat16", quantization=name) for name in ("auto", "none"))
    recurrent, attention = (one.attention for one in layers(kept)[:2])
    for product in (recurrent.input_CD, recurrent.output_DC, attention.qkv_CD, attention.gate_CD):
        assert isinstance(product, QuantizedWeight)
    of_kept, of_wide = (driver.prefill(make_sequence(PROMPT), 64) for driver in (kept, wide))
    assert torch.equal(of_kept, of_wide)


def test_products_with_a_part_that_is_wide_on_disk_are_wide_and_the_others_narrow(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any
) -> None:
    folder = make_checkpoint("llama, llama3 rope").folder
    tensors = put_in_float8(folder, "rows", but="layers.1.self_attn.k_proj")
    assert "model.layers.1.self_attn.k_proj.weight_scale" not in tensors
    kept, wide = (make_driver(folder, dtype="bfloat16", quantization=name) for name in ("auto", "none"))
    narrow = [isinstance(one.attention.qkv_CD, QuantizedWeight) for one in layers(kept)]
    assert narrow == [True, False, True]
    assert layers(kept)[1].attention.qkv_CD.dtype is torch.bfloat16
    of_kept, of_wide = (driver.prefill(make_sequence(PROMPT), 64) for driver in (kept, wide))
    assert torch.equal(of_kept, of_wide)


@pytest.mark.parametrize(
    ("dtype", "block", "reason"),
    [
        ("float32", (32, 32), "--dtype float32 requires exact products"),
        ("bfloat16", (32, 16), "groups of 16 inputs are not supported, only groups of 32, 64, 128"),
    ],
)
def test_float8_weights_without_a_kernel_are_widened_and_logged(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, block: Block, reason: str
) -> None:
    monkeypatch.setitem(KINDS, "other", (block, "_scale_inv", {"quant_method": "fp8", "weight_block_size": [*block]}))
    folder = make_checkpoint("llama, llama3 rope").folder
    put_in_float8(folder, "other")
    with capture_logs() as lines:
        model = load_model(folder, device="cpu", dtype=dtype)
    (said,) = [line for line in lines if line["event"] == "checkpoint_widened"]
    with pytest.raises(UnsupportedModelError, match=f"--quantization fp8 is not available: {reason}"):
        load_model(folder, device="cpu", dtype=dtype, quantization="fp8")
    assert said["stored_as"] == "fp8"
    assert reason in said["reason"]
    assert isinstance(model._weights.layers[0].attention.output_DC, Tensor)


def test_float8_that_does_not_fit_its_scales_or_is_another_kind_is_refused_by_name(make_checkpoint: Any) -> None:
    folder = make_checkpoint("llama, llama3 rope").folder
    tensors = put_in_float8(folder, "blocks")
    name = "model.layers.0.self_attn.q_proj.weight"
    for broken, why in (
        ({f"{name}_scale_inv": tensors[f"{name}_scale_inv"][:, :1].clone()}, "do not match blocks of 32 by 32"),
        ({name: tensors[name].float().to(torch.float8_e5m2)}, r"the values are torch\.float8_e5m2"),
    ):
        save_file(tensors | broken, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(WeightsError, match=rf"q_proj\.weight in .*{why}"):
            load_model(folder, device="cpu", dtype="bfloat16")
    save_file({key: one for key, one in tensors.items() if key != f"{name}_scale_inv"}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"q_proj\.weight in .* it is float8 but has no scale"):
        load_model(folder, device="cpu", dtype="bfloat16")


def test_unreadable_float8_checkpoints_are_refused_with_the_readable_forms(make_checkpoint: Any) -> None:
    folder = make_checkpoint("llama, llama3 rope").folder
    config = json.loads((folder / "config.json").read_text())
    for settings in (compressed("tensor_group"), compressed("channel", num_bits=4), compressed("block")):
        with pytest.raises(
            UnsupportedModelError, match=r"quantization compressed-tensors 'float-quantized'.*supported are fp8"
        ):
            spec_from_config(config | {"quantization_config": settings})


def test_matrices_in_float8_are_read_block_by_block_and_layers_for_drafting_are_left_alone(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any
) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = make_checkpoint("deepseek_v3")
    tensors = load_file(checkpoint.folder / "model.safetensors")
    plain = dict(tensors)
    for name, weight in list(tensors.items()):
        if weight.dim() == 2 and "proj" in name:
            narrow, scale = in_float8(weight, (32, 16))
            tensors |= {name: narrow, f"{name}_scale_inv": scale}
            wide = scale.repeat_interleave(32, 0).repeat_interleave(16, 1)
            plain[name] = narrow.float() * wide[: weight.shape[0], : weight.shape[1]]
    save_file(plain, checkpoint.folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint.oracle = AutoModelForCausalLM.from_pretrained(checkpoint.folder, attn_implementation="eager").eval()
    last = [name for name in tensors if "layers.1." in name]
    drafting = {name.replace("layers.1.", "layers.2."): tensors[name].clone() for name in last}
    save_file(tensors | drafting, checkpoint.folder / "model.safetensors")
    say_quantized(checkpoint.folder, {"quant_method": "fp8", "weight_block_size": [32, 16]})
    ours = make_driver(checkpoint.folder).prefill(make_sequence(PROMPT), 64).log_softmax(-1)
    assert (ours - checkpoint.logprobs(PROMPT)).abs().max() <= 1e-4
