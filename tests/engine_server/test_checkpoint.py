from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moiety_engine.checkpoint import fingerprint, resolve_checkpoint
from moiety_engine.errors import CheckpointError
from moiety_options.model_options import model_name


def test_a_folder_with_a_config_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "a/b/c", "just-a-name", "../x"])
def test_names_that_are_neither_folder_nor_hub_id_are_refused(model: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        resolve_checkpoint(model)


UPSIDE_DOWN = (34).to_bytes(8, "little") + b'{"a": {"data_offsets": [-90, -2]}}'


def write_checkpoint(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Write a checkpoint in two files, as large ones have several."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, folder / "b.safetensors")
    return folder


def test_copies_have_one_fingerprint_and_other_numbers_in_any_tensor_another(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensors = {f"layer.{n}": random.random((64, 64), dtype=np.float32) for n in range(7)}
    tensors |= {"norm": random.random(3, dtype=np.float32), "empty": np.zeros((0, 4), dtype=np.float32)}
    first = write_checkpoint(tmp_path / "first", tensors)
    copy = shutil.copytree(first, tmp_path / "elsewhere", copy_function=shutil.copyfile)  # with times of its own
    assert fingerprint(copy) == fingerprint(first)
    found = {fingerprint(first)}
    for name in sorted(tensors.keys() - {"empty"}):
        found.add(fingerprint(write_checkpoint(tmp_path / name, tensors | {name: tensors[name] * 1.001})))
    assert len(found) == len(tensors)


def test_an_invalid_checkpoint_has_a_fingerprint_and_loading_it_reports_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = set()
    for contents in (
        b"",
        b"short",
        (4).to_bytes(8, "little") + b"[42]",
        (99).to_bytes(8, "little") + b'{"a": {}}',
        UPSIDE_DOWN,
    ):
        (tmp_path / "model.safetensors").write_bytes(contents)
        found.add(fingerprint(tmp_path))
    assert len(found) == 5


def test_a_hub_id_without_a_network_says_what_to_do(tmp_path: Path) -> None:
    program = """
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.errors import CheckpointError
try:
    resolve_checkpoint("nobody/nothing")
except CheckpointError as exc:
    print(exc)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "connect to the internet once" in found.stdout


def test_a_model_is_called_by_its_id_at_the_hub_or_by_its_folders_name() -> None:
    names = {
        "/models/Tiny-MoE/": "Tiny-MoE",
        "./models/Tiny-MoE": "Tiny-MoE",
        "org/name": "org/name",
        "": "moiety-demo",
    }
    assert {model: model_name(model) for model in names} == names
