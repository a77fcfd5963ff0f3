"""The kernels for CPUs compile for Arm, and agree with their references there, where qemu is installed to run them.

`docs/cpu-kernels.md` says how to install qemu and the compiler that this needs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moiety_kernels.cpu.instructions import ARM_EXTENSIONS, ARM_LEVEL, LEVEL, VARIABLE

from .arm_emulation import C_FUNCTIONS, FOLDER_VARIABLE, HAS_ZIG, OF_PYTHON, QEMU
from .test_cpu_levels import num_passed, run_limited

HERE = Path(__file__).parent
EXTENSIONS = ",".join(sorted(ARM_EXTENSIONS))
FILES = {"test_small_operations.py": 15, "test_quantization.py": 12, "test_against_reference.py": 25}  # of a sample

pytestmark = pytest.mark.skipif(bool(LEVEL), reason="the level of this process is limited already")

COMPILED = """
import json
from arm_emulation import all_kernels, compile_for_arm
compiled = [compile_for_arm(function, *arguments) for function, arguments in all_kernels()]
used = {name for one in compiled for name in one.instructions}
kernels = {one.symbol: [len(one.object_file), *one.externals] for one in compiled}
print(json.dumps({"kernels": kernels, "instructions": sorted(used & {"bfdot", "bfcvtn", "bfcvtn2", "sdot", "usdot"})}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "extensions, expected", [("", []), (EXTENSIONS, ["bfcvtn", "bfcvtn2", "bfdot", "sdot", "usdot"])]
)
def test_every_kernel_compiles_for_arm_without_an_instruction_of_x86(extensions: str, expected: list[str]) -> None:
    done = run_limited(ARM_LEVEL, "-c", COMPILED, **{"PYTHONPATH": str(HERE), VARIABLE: extensions})
    found = json.loads(done.stdout)
    assert found["instructions"] == expected
    compiled = found["kernels"]
    assert len(compiled) >= 45
    for symbol, (size, *externals) in compiled.items():
        assert size > 1000
        others = {name for name in externals if not name.startswith(OF_PYTHON)}
        assert others <= C_FUNCTIONS, symbol


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(QEMU is None, reason="qemu-aarch64 is not installed (Debian: qemu-user-static)")
@pytest.mark.skipif(not HAS_ZIG, reason="the compiler and linker for Arm are not installed (PyPI: ziglang)")
@pytest.mark.parametrize("extensions", ["", EXTENSIONS])
@pytest.mark.parametrize("name", FILES)
def test_kernels_on_an_emulated_arm_agree_with_their_references(name: str, extensions: str, tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    variables = {FOLDER_VARIABLE: str(tmp_path), "PYTHONPATH": paths, "MOIETY_TEST_ALL": "", VARIABLE: extensions}
    assert num_passed(ARM_LEVEL, "-p", "arm_emulation", str(HERE / name), **variables) >= FILES[name]
