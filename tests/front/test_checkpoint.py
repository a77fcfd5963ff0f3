from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moiety_engine.checkpoint import model_name, resolve_checkpoint
from moiety_engine.errors import CheckpointError


def test_a_folder_with_a_config_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "a/b/c", "just-a-name", "../x"])
def test_what_is_neither_folder_nor_hub_id_is_refused(model: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        resolve_checkpoint(model)


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
    assert "go online once" in found.stdout


def test_a_model_is_called_by_the_last_part_of_where_it_is() -> None:
    assert [model_name(model) for model in ("/models/Tiny-MoE/", "org/name", "")] == ["Tiny-MoE", "name", "moiety-demo"]
