"""Invalid checkpoints are refused by name, or read as their index says; a failed write leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moiety_engine.errors import CheckpointError
from moiety_engine.model.errors import UnsupportedModelError, WeightsError
from moiety_engine.model.families import read_spec
from moiety_engine.model.loading import load_model
from moiety_engine.quantize.writing import write_quantized
from moiety_kernels.quantization import INT4, INT8

PROMPT = list(range(3, 60))
GATE, UP = ("model.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight")


def silent(*_: Any) -> None:
    pass


def split(folder: Path, shards: dict[str, dict[str, torch.Tensor]], where: dict[str, str]) -> None:
    """The checkpoint anew in these files, with an index that says where each tensor is."""
    for name, tensors in shards.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_an_unknown_family_is_refused_with_the_families_that_are_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    with pytest.raises(UnsupportedModelError, match=r"perceptron.*qwen3_moe"):
        read_spec(tmp_path)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_tensor_that_is_in_two_files_is_read_from_the_one_that_the_index_names(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, quantization: str
) -> None:
    folder = make_checkpoint("deepseek_v3, as wide as blocks").folder
    whole = make_driver(folder, quantization=quantization).prefill(make_sequence(PROMPT), 64)
    tensors = load_file(folder / "model.safetensors")
    twice = [name for name in tensors if "experts.0." in name and "layers.1" in name]
    assert len(twice) == 3
    stale = {name: torch.full_like(tensors[name], 9.0) for name in twice}
    where = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    split(
        folder,
        {"a.safetensors": tensors, "b.safetensors": stale | {"model.norm.weight": tensors["model.norm.weight"]}},
        where,
    )
    read = make_driver(folder, quantization=quantization).prefill(make_sequence(PROMPT), 64)
    assert torch.equal(read, whole)


def narrowed(make_checkpoint: Any, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path / "narrow"
    write_quantized(make_checkpoint("mixtral, sliding window").folder, folder, INT4, silent)
    return folder, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("lacks", ["_scale", "_shape"])
def test_a_packed_weight_without_its_scales_or_shape_is_refused_by_name(
    make_checkpoint: Any, tmp_path: Path, lacks: str
) -> None:
    folder, tensors = narrowed(make_checkpoint, tmp_path)
    name = f"model.layers.0.self_attn.q_proj.weight{lacks}"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=f"lacks {name}"):
        load_model(folder, device="cpu", dtype="auto")


@pytest.mark.parametrize("shape", [[1 << 40, 1 << 40], [-1, 64], [64], [64, 63], [0, 0]])
def test_a_packed_weight_of_a_shape_that_it_has_not_is_refused_by_name(
    make_checkpoint: Any, tmp_path: Path, shape: list[int]
) -> None:
    folder, tensors = narrowed(make_checkpoint, tmp_path)
    tensors["model.layers.0.self_attn.q_proj.weight_shape"] = torch.tensor(shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight in "):
        load_model(folder, device="cpu", dtype="auto")


def test_scales_that_do_not_fit_their_matrix_are_refused_by_name(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, tensors = narrowed(make_checkpoint, tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    tensors[name] = tensors[name][:, :0].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight in "):
        load_model(folder, device="cpu", dtype="auto")


def test_a_model_that_also_sees_is_served_from_what_was_written_of_it(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, tmp_path: Path
) -> None:
    folder = make_checkpoint("gemma3").folder
    config = json.loads((folder / "config.json").read_text())
    around = {"model_type": "gemma3", "torch_dtype": "float32", "text_config": config | {"model_type": "gemma3_text"}}
    (folder / "config.json").write_text(json.dumps(around))
    write_quantized(folder, tmp_path / "narrow", INT8, silent)
    read, made = (make_driver(one, quantization="int8") for one in (tmp_path / "narrow", folder))
    assert torch.equal(read.prefill(make_sequence(PROMPT), 64), made.prefill(make_sequence(PROMPT), 64))


def test_quantization_that_cannot_write_reports_it_and_leaves_no_files(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral, sliding window").folder
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_quantized(folder, tmp_path / "file" / "narrow", INT8, silent)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        write_quantized(folder, tmp_path / "narrow", INT8, full)
    assert not list(tmp_path.glob("narrow*"))
