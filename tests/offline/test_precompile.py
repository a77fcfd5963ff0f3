"""`moiety precompile` compiles once, on disk, what later processes load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moiety_kernels

# A start of an engine as `moiety serve` has it, which reports the functions that it had to compile.
START = """
from moiety_engine.bench.engine import measure
from moiety_engine.bench.lengths import fixed_lengths
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig
from moiety_kernels.cpu.compile_progress import progress
folder = resolve_checkpoint("")
config = EngineConfig(model=str(folder), name=folder.name, device="cpu")
measure(config, fixed_lengths(3, 90, 6), seed=1, on_load=lambda *_: None, on_done=lambda _: None)
print(progress.num_compiled)
"""


@pytest.mark.slow
def test_a_start_after_precompilation_compiles_nothing(tmp_path: Path) -> None:
    """The kernels are a copy of the package, which nothing has compiled yet."""
    package = tmp_path / "moiety_kernels"
    shutil.copytree(Path(moiety_kernels.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, env=environment, check=False, timeout=250
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    command = ("-m", "moiety_platform.cli", "precompile", "--json")
    assert json.loads(run(*command))["compiled"] > 5
    assert int(run("-c", START)) == 0
    assert json.loads(run(*command))["compiled"] == 0
