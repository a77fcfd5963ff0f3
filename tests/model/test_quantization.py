"""Quantized checkpoints: quantized while loading or written so, they are the same model, close to the original one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig
from moiety_engine.errors import CheckpointError, InvalidConfig
from moiety_engine.model.checkpoint_formats.integers import from_integers, to_packed, unpacked
from moiety_engine.model.errors import UnsupportedModelError
from moiety_engine.model.loading import load_model
from moiety_engine.model.weights import products_of
from moiety_engine.quantize.report import quantize_and_measure
from moiety_engine.quantize.writing import write_quantized
from moiety_kernels.cpu import paths
from moiety_kernels.quantization import INT4, INT8, QuantizedWeight, WeightFormat, dequantize, quantize
from moiety_kernels.quantization.reference import round_to

FAMILIES = [
    "mixtral, sliding window",
    "deepseek_v3, as wide as blocks",
    "deepseek_v4, as wide as blocks",
    "gpt_oss, experts as wide as blocks",
    "ernie4_5_moe",
    "gemma3",
    "llama, llama3 rope",
]


def silent(*_: Any) -> None:
    pass


def widen(plain: Any, narrow: Any) -> None:
    """Give a plain model's products the weights that a narrow model's stand for."""
    if isinstance(narrow, QuantizedWeight):
        plain.copy_(dequantize(narrow))
    elif isinstance(narrow, tuple):
        for ours, theirs in zip(plain, narrow, strict=True):
            widen(ours, theirs)
    elif is_dataclass(narrow):
        for field in fields(narrow):
            widen(getattr(plain, field.name), getattr(narrow, field.name))


@pytest.fixture
def as_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in few bits are unpacked, as on matrix tiles, not multiplied as they lie."""
    monkeypatch.setattr(paths, "is_usable", lambda path: path is paths.FLOATS)


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.usefixtures("as_bfloat16")
def test_a_family_in_few_bits_is_the_model_of_the_weights_they_stand_for(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, variant: str, name: str
) -> None:
    folder, prompt = make_checkpoint(variant).folder, list(range(3, 60))
    narrow = make_driver(folder, dtype="bfloat16", quantization=name)
    plain = make_driver(folder, dtype="bfloat16")
    before = plain.prefill(make_sequence(prompt), 100)
    widen(plain.model._weights, narrow.model._weights)
    ours = narrow.prefill(make_sequence(prompt), 100)
    assert torch.equal(ours, plain.prefill(make_sequence(prompt), 100))
    assert not torch.equal(ours, before)
    assert torch.equal(ours, make_driver(folder, dtype="bfloat16", quantization=name).prefill(make_sequence(prompt), 1))


@pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])
def test_a_written_checkpoint_of_deepseek_v4_is_the_model_that_is_put_so_while_loading(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, tmp_path: Path, form: WeightFormat
) -> None:
    folder, prompt = make_checkpoint("deepseek_v4, as wide as blocks", dtype=torch.bfloat16).folder, list(range(3, 60))
    write_quantized(folder, tmp_path / "narrow", form, silent)
    ours, theirs = (make_driver(one, dtype="bfloat16", quantization=form.name) for one in (tmp_path / "narrow", folder))
    assert torch.equal(ours.prefill(make_sequence(prompt), 100), theirs.prefill(make_sequence(prompt), 100))


def test_a_model_of_odd_widths_is_refused_with_what_to_do(make_checkpoint: Any) -> None:
    folder = make_checkpoint("qwen3_moe").folder
    with pytest.raises(UnsupportedModelError, match="a multiple of 32 weights, but the model has rows of 48"):
        load_model(folder, device="cpu", dtype="auto", quantization="int8")


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_the_demo_model_written_in_few_bits_is_as_good_within_the_bounds(tmp_path: Path, name: str) -> None:
    source = resolve_checkpoint("")
    config = EngineConfig(model=str(source), name="demo", device="cpu")
    report = quantize_and_measure(config, tmp_path / "narrow", name, None, 12, 1024, silent)
    assert report.before is not None
    assert report.after is not None
    assert report.bytes_after < (0.45 if name == "int4" else 0.6) * report.bytes_before
    assert report.before.accuracy is not None
    assert report.after.accuracy is not None
    assert report.after.accuracy >= report.before.accuracy - (0.03 if name == "int4" else 0.01)
    assert report.after.perplexity <= report.before.perplexity * (1.05 if name == "int4" else 1.01)
    while_reading = load_model(source, device="cpu", dtype="auto", quantization=name)
    written = load_model(tmp_path / "narrow", device="cpu", dtype="auto")
    for ours, theirs in zip(while_reading._weights.layers, written._weights.layers, strict=True):
        assert torch.equal(ours.ffn.down_EDF.values_NK, theirs.ffn.down_EDF.values_NK)


def test_numbers_are_packed_as_others_read_them() -> None:
    weight = torch.randn(3, 96)
    for form in (INT8, INT4):
        q, scales = round_to(weight, form)
        parts = to_packed(q, scales, form.bits)
        assert parts["_packed"].dtype is torch.int32
        lowest = int(parts["_packed"][0, 0]) & ((1 << form.bits) - 1)
        assert lowest == int(q[0, 0]) + (1 << form.bits - 1), "the first is in the lowest bits, plus half the range"
        read = from_integers(unpacked(parts["_packed"], form.bits), parts["_scale"], None, form.bits, form.group)
        torch.testing.assert_close(read, dequantize(quantize(weight, form)))


def test_written_checkpoints_state_their_format_and_overwrite_nothing(tmp_path: Path, make_checkpoint: Any) -> None:
    folder = make_checkpoint("mixtral, sliding window").folder
    write_quantized(folder, tmp_path / "narrow", INT8, silent)
    settings = json.loads((tmp_path / "narrow" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "compressed-tensors"
    assert settings["config_groups"]["group_0"]["weights"]["num_bits"] == 8
    assert "lm_head" in settings["ignore"]
    tensors = load_file(tmp_path / "narrow" / "model.safetensors")
    assert "lm_head.weight" in tensors
    assert "model.layers.0.self_attn.q_proj.weight_packed" in tensors
    with pytest.raises(CheckpointError, match="exists already and is not overwritten"):
        write_quantized(folder, tmp_path / "narrow", INT8, silent)
    with pytest.raises(CheckpointError, match="quantized already"):
        write_quantized(tmp_path / "narrow", tmp_path / "again", INT4, silent)
    assert not (tmp_path / "again").exists()


def begin(source: Path, target: Path) -> subprocess.Popen[str]:
    """A run in a process of its own, in the middle of its work."""
    code = (
        "import sys, threading; from pathlib import Path; from moiety_engine.quantize.writing import write_quantized\n"
        "from moiety_kernels.quantization import INT8\n"
        "def stop(*_): print('at it', flush=True); threading.Event().wait()\n"
        "write_quantized(Path(sys.argv[1]), Path(sys.argv[2]), INT8, stop)"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(target)], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None and started.stdout.readline() == "at it\n"
    return started


def test_leftovers_of_a_killed_run_are_replaced_and_a_running_one_is_left_alone(
    tmp_path: Path, make_checkpoint: Any
) -> None:
    source, target = make_checkpoint("mixtral, sliding window").folder, tmp_path / "to" / "narrow"
    other = begin(source, target)
    with pytest.raises(CheckpointError, match=r"narrow\.part is being written by another run"):
        write_quantized(source, target, INT8, silent)
    other.kill()
    other.communicate()
    (target.with_name("narrow.part") / "model-0.safetensors").write_bytes(b"half of it")
    with capture_logs() as logged:
        write_quantized(source, target, INT8, silent)
    assert [one["event"] for one in logged] == ["quantization_restarted"]
    assert [path.name for path in target.parent.iterdir()] == ["narrow"]
    assert {path.name for path in target.iterdir()} == {path.name for path in source.iterdir() if path.is_file()}


def test_a_folder_of_somebody_else_that_is_called_like_a_draft_is_left_alone(
    tmp_path: Path, make_checkpoint: Any
) -> None:
    (tmp_path / "narrow.part").mkdir()
    (tmp_path / "narrow.part" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"was not left by an earlier run; move it away"):
        write_quantized(make_checkpoint("mixtral, sliding window").folder, tmp_path / "narrow", INT8, silent)
    assert (tmp_path / "narrow.part" / "thesis.txt").read_text() == "mine"


def test_unquantized_weights_of_a_written_checkpoint_are_not_rounded(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint("llama, llama3 rope").folder
    write_quantized(folder, tmp_path / "narrow", INT8, silent)
    wide = load_file(folder / "model.safetensors")
    tensors = load_file(tmp_path / "narrow" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    for end in ("_packed", "_scale", "_shape"):
        del tensors[name + end]
    save_file(tensors | {name: wide[name]}, tmp_path / "narrow" / "model.safetensors", metadata={"format": "pt"})
    layers = load_model(tmp_path / "narrow", device="cpu", dtype="bfloat16")._weights.layers
    assert torch.equal(layers[1].ffn.down_DF, wide[name].bfloat16())
    assert all(isinstance(layers[index].ffn.down_DF, QuantizedWeight) for index in (0, 2))


def test_bad_requests_say_what_to_do(tmp_path: Path) -> None:
    source = resolve_checkpoint("")
    with pytest.raises(InvalidConfig, match="quantization must be one of auto, none, int8, int4, fp8"):
        EngineConfig(model=str(source), name="demo", quantization="int3")
    with pytest.raises(InvalidConfig, match="choose one of int8, int4, fp8"):
        quantize_and_measure(EngineConfig(model=str(source), name="d"), tmp_path / "x", "int3", None, 1, 8, silent)


@pytest.mark.parametrize("variant", ["mixtral, sliding window", "llama, llama3 rope"])
@pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])
def test_in_float32_a_packed_checkpoint_is_the_model_of_its_numbers_times_its_scales(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, tmp_path: Path, variant: str, form: WeightFormat
) -> None:
    source, narrow = make_checkpoint(variant).folder, tmp_path / "narrow"
    write_quantized(source, narrow, form, silent)
    tensors = load_file(narrow / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_packed")]:
        plain = name.removesuffix("_packed")
        q, scales = (tensors.pop(plain + end) for end in ("_packed", "_scale"))
        del tensors[plain + "_shape"]
        tensors[plain] = from_integers(unpacked(q, form.bits), scales, None, form.bits, form.group)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    prompt = list(range(3, 90))
    with capture_logs() as logs:
        widened = make_driver(narrow, dtype="float32")
    assert [one["stored_as"] for one in logs if one["event"] == "checkpoint_widened"] == [form.name]
    assert not any(isinstance(one, QuantizedWeight) for one in products_of(widened.model._weights))
    assert torch.equal(
        widened.prefill(make_sequence(prompt), 64), make_driver(source).prefill(make_sequence(prompt), 64)
    )
    kept = make_driver(narrow, dtype="float32", quantization=form.name)
    assert all(isinstance(one, QuantizedWeight) for one in products_of(kept.model._weights)), "it was asked for"
