"""Tuned choices on disk: which processes read them, which do not, and the handling of an unreadable file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import moiety_kernels
from moiety_kernels.gpu.targets import H200
from moiety_kernels.grouped_gemm.launch_config import OPERATION, key
from moiety_kernels.grouped_gemm.tile_cost_model import Problem, candidates, choose
from moiety_kernels.tuning.choices import Choice, Choices, cache_folder, path_of, read

PROBLEM = Problem(num_experts=128, top_k=8, width=2048, hidden=768, tokens=64)
OTHER = next(one for one in candidates(PROBLEM, H200) if one != choose(PROBLEM, H200))
ASK = f"""
from moiety_kernels.gpu.targets import H200
from moiety_kernels.grouped_gemm.launch_config import configuration
from moiety_kernels.grouped_gemm.tile_cost_model import Problem, choose
problem = Problem(128, 8, 2048, 768, tokens=%d)
print("tuned" if configuration(problem, H200).name == {OTHER.name!r} else "model")
assert configuration(problem, H200).name == {OTHER.name!r} or configuration(problem, H200) == choose(problem, H200)
"""


def keep(folder: Path) -> Choices:
    choices = read(path_of(H200.name, folder), H200.name)
    choices.put(OPERATION, key(PROBLEM), Choice(asdict(OTHER), 12.5))
    return choices


def ask(folder: Path, *, tokens: int = 64, root: str = "") -> subprocess.CompletedProcess[str]:
    """What another process would launch the layer with, and what it says on standard error."""
    paths = os.pathsep.join([root, *sys.path])
    environment = os.environ | {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": paths}
    environment.pop("MOIETY_TUNING_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", ASK % tokens], capture_output=True, text=True, env=environment, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache folder; choices are kept in the place below it where engines look."""
    monkeypatch.delenv("MOIETY_TUNING_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_another_process_launches_what_was_tuned(cache: Path) -> None:
    assert ask(cache).stdout == "model\n"
    keep(cache_folder())
    assert ask(cache).stdout == "tuned\n"
    assert ask(cache, tokens=80).stdout == "tuned\n"  # nearer to 64 than to 128
    assert ask(cache, tokens=96).stdout == "model\n"


def test_changed_kernels_forget_their_choices(cache: Path, tmp_path: Path) -> None:
    keep(cache_folder())
    root = tmp_path / "changed"
    shutil.copytree(Path(moiety_kernels.__file__).parent, root / "moiety_kernels")
    assert ask(cache, root=str(root)).stdout == "tuned\n"
    with (root / "moiety_kernels" / OPERATION / "kernel.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert ask(cache, root=str(root)).stdout == "model\n"


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 1}', '{"format": 1, "device": "NVIDIA H200", "operations": 3}']
)
def test_a_file_that_makes_no_sense_is_said_to_and_written_anew(cache: Path, text: str) -> None:
    path = path_of(H200.name)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    done = ask(cache)
    assert done.stdout == "model\n"
    assert str(path) in done.stderr
    assert "moiety kernels tune" in done.stderr
    keep(cache_folder())
    assert ask(cache).stdout == "tuned\n"


def test_a_choice_that_is_no_candidate_is_not_launched(cache: Path) -> None:
    choices = read(path_of(H200.name), H200.name)
    choices.put(OPERATION, key(PROBLEM), Choice(asdict(OTHER) | {"BM": 4096}, 0.1))
    assert ask(cache).stdout == "model\n"


def test_writers_at_once_lose_nothing(cache: Path) -> None:
    write = (
        "import sys\nfrom moiety_kernels.tuning.choices import *\nchoices = read(path_of('GPU'), 'GPU')\n"
        "for n in range(20): choices.put('rms_norm', f'{sys.argv[1]} {n}', Choice({'n': n}, 1.0))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [subprocess.Popen([sys.executable, "-c", write, name], env=environment) for name in ("a", "b", "c")]
    assert [writer.wait(100) for writer in writers] == [0, 0, 0]
    found = read(path_of("GPU"), "GPU").found["rms_norm"]
    assert set(found) == {f"{name} {n}" for name in "abc" for n in range(20)}
    assert {one.suffix for one in path_of("GPU").parent.iterdir()} == {".json", ".lock"}


def test_each_device_has_its_own_file(cache: Path) -> None:
    keep(cache_folder())
    other = read(path_of("AMD Instinct MI300X"), "AMD Instinct MI300X")
    assert other.get(OPERATION, key(PROBLEM)) is None
    stored: dict[str, Any] = json.loads(path_of(H200.name).read_text())
    assert stored["device"] == H200.name
