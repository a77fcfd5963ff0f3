"""`moiety precompile` compiles once, on disk, what later processes load."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import moiety_kernels
from moiety_engine.precompile import precompile
from moiety_kernels.cpu.levels import COMPILE_ONLY_VARIABLE, LEVEL_VARIABLE

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


COMMAND = ("-m", "moiety_platform.cli", "precompile", "--json")
IS_X86 = platform.machine() == "x86_64"


class NewKernels:
    """Copy of the kernels' package, which nothing has compiled yet."""

    def __init__(self, folder: Path) -> None:
        package = folder / "moiety_kernels"
        shutil.copytree(Path(moiety_kernels.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        limits = {LEVEL_VARIABLE, COMPILE_ONLY_VARIABLE}
        self.environment = {name: value for name, value in os.environ.items() if name not in limits}
        self.environment["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])

    def run(self, *command: str, **variables: str) -> str:
        environment = self.environment | variables
        command = (sys.executable, *command)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=250)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.mark.slow
def test_a_start_after_precompilation_compiles_nothing(tmp_path: Path) -> None:
    kernels = NewKernels(tmp_path)
    assert json.loads(kernels.run(*COMMAND))["compiled"] > 5
    assert int(kernels.run("-c", START)) == 0
    assert json.loads(kernels.run(*COMMAND))["compiled"] == 0


@pytest.mark.slow
@pytest.mark.skipif(not IS_X86, reason="the levels are those of x86")
def test_kernels_compiled_for_levels_serve_a_cpu_of_each(tmp_path: Path) -> None:
    """Kernels that were compiled without running them are those that a start loads."""
    kernels = NewKernels(tmp_path)
    here = json.loads(kernels.run("-m", "moiety_kernels.cpu.paths"))["compiled_for"]
    if here is None:
        pytest.skip("this processor has no AVX2")
    figures = json.loads(kernels.run(*COMMAND, "--cpu-levels", f"{here},amx"))
    assert list(figures["levels"]) == list(dict.fromkeys([here, "amx"]))
    assert all(level["compiled"] > 5 for level in figures["levels"].values())
    assert int(kernels.run("-c", START)) == 0
    if here != "avx2":
        assert int(kernels.run("-c", START, **{LEVEL_VARIABLE: "avx2"})) > 5


def test_a_level_that_does_not_exist_is_refused() -> None:
    app = typer.Typer()
    app.command("precompile")(precompile)
    result = CliRunner().invoke(app, ["--cpu-levels", "avx2,sse"])
    assert result.exit_code == 2
    assert "no level 'sse'; give all, or some of avx2, avxvnni" in " ".join(result.output.replace("│", " ").split())
