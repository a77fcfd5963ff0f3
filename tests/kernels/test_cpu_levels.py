"""`MOIETY_CPU_LEVEL` limits the kernels to the instructions of a lesser CPU, where they agree with the references.

Each level needs a process of its own: the instructions are chosen when the kernels are imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moiety_kernels.cpu import paths
from moiety_kernels.cpu.instructions import ARM_EXTENSIONS, ARM_LEVEL, LEVEL, LEVELS, VARIABLE
from moiety_kernels.cpu.levels import LEVEL_VARIABLE

HERE = Path(__file__).parent
# a product of each format and kind of weight, attention, and kernels without a product
FEW = "product and 7-128 or any_number_of_groups and (160 or 1056) or zeros"
FILES = ("test_against_reference.py", "test_quantization.py", "test_small_operations.py", "test_cpu_mutants.py")

pytestmark = pytest.mark.skipif(bool(LEVEL), reason="the level of this process is limited already")


def run_limited(level: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of that level; "" is the whole processor."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_") and name != VARIABLE}
    env |= {LEVEL_VARIABLE: level} | variables
    command = [sys.executable, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1100, check=False)


def num_passed(level: str, *args: str, **variables: str) -> int:
    command = ["-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", *args]
    done = run_limited(level, *command, **({"MOIETY_TEST_ALL": "1"} | variables))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    found = re.search(r"(\d+) passed", done.stdout)
    return int(found[1]) if found else 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "level, emulated", [("avx2", ""), ("avx512", ""), (ARM_LEVEL, ""), (ARM_LEVEL, ",".join(sorted(ARM_EXTENSIONS)))]
)
def test_products_at_a_level_agree_with_their_references(level: str, emulated: str) -> None:
    files = [str(HERE / name) for name in ("test_quantization.py", "test_against_reference.py")]
    assert num_passed(level, *files, "-k", FEW, **{VARIABLE: emulated}) >= 40


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("level", LEVELS)
def test_kernels_at_every_level_agree_with_their_references(level: str, name: str) -> None:
    assert num_passed(level, str(HERE / name), "-k", "not mutant_is_found") > 0


REPORT = """
import json
from numba import njit
from moiety_kernels.cpu import paths
from moiety_kernels.cpu.vectors import sum_squares

@njit
def call(row, count):
    return sum_squares(row, count)

call.compile("float32(int64, int64)")
[code] = call.inspect_asm().values()
print(json.dumps(paths.report() | {"zmm": "zmm" in code, "ymm": "ymm" in code}))
"""


def test_a_level_withholds_its_instructions_from_the_choice_and_the_compiler() -> None:
    whole, limited = (json.loads(run_limited(level, "-c", REPORT).stdout) for level in ("", "avx2"))
    assert not limited["zmm"]
    assert whole["zmm"] == any(name.startswith("avx512f") for name in limited["withheld"])
    assert whole["level"] is None and whole["withheld"] == [] and limited["level"] == "avx2"
    for weights, candidates in paths.PATHS.items():
        served = limited["paths"][weights]
        assert served["path"] in ("words", "floats")
        assert (served["path"] == "words") == (limited["ymm"] and weights in ("8 bits", "4 bits"))
        assert list(served["not"]) == [one.title for one in candidates[: len(served["not"])]]
    if limited["withheld"]:
        reason = limited["paths"]["4 bits"]["not"][paths.PAIRS.title]
        assert "avx512" in reason


@pytest.mark.skipif(not paths.is_usable(paths.PAIRS), reason="this processor does not multiply in pairs")
def test_slow_pairs_serve_only_weights_for_which_nothing_is_faster() -> None:
    served = {
        level: {weights: one["path"] for weights, one in json.loads(done.stdout)["paths"].items()}
        for level in ("avx512bf16", "avx512bf16-slow")
        if (done := run_limited(level, "-m", "moiety_kernels.cpu.paths"))
    }
    fast, slow = served.values()
    assert fast == {"bfloat16": "pairs", "8 bits": "words", "4 bits": "pairs", "4-bit floats": "pairs"}
    assert slow == {"bfloat16": "floats", "8 bits": "words", "4 bits": "words", "4-bit floats": "pairs"}


COMPILES = """
import sys
from numba import config
from moiety_kernels.cpu import compiling, products
from moiety_kernels.cpu.compile_progress import progress
compiling.use_cache = lambda: True
config.CACHE_DIR = sys.argv[1]
compiling.function_address(products._with_float32, 10)
print(progress.num_compiled)
"""


def test_compiled_kernels_are_kept_for_each_level(tmp_path: Path) -> None:
    counts = [int(run_limited(level, "-c", COMPILES, str(tmp_path)).stdout) for level in ("", "avx2", "", "avx2")]
    withholds = bool(json.loads(run_limited("avx2", "-m", "moiety_kernels.cpu.paths").stdout)["withheld"])
    assert counts == [1, int(withholds), 0, 0]


def test_the_code_of_arms_level_is_kept_apart_from_that_of_the_same_features() -> None:
    code = "from moiety_kernels.cpu.code_cache import config, use_cache\nuse_cache()\nprint(config.CACHE_DIR)"
    kept = {run_limited(level, "-c", code).stdout for level in ("avx2", ARM_LEVEL)}
    assert len(kept) == 2


def test_a_level_that_does_not_exist_is_refused() -> None:
    done = run_limited("sse2", "-c", "import moiety_kernels.cpu.instructions")
    assert f"{LEVEL_VARIABLE} is 'sse2'; it takes one of avx2, " in done.stderr


def test_emulated_extensions_of_arm_need_its_level() -> None:
    done = run_limited("avx2", "-c", "import moiety_kernels.cpu.instructions", **{VARIABLE: "bf16"})
    assert f"{VARIABLE} names bf16; these need {LEVEL_VARIABLE}=neon" in done.stderr


def test_a_level_is_refused_once_numba_compiles_for_the_whole_processor() -> None:
    withheld = json.loads(run_limited("avx2", "-m", "moiety_kernels.cpu.paths").stdout)["withheld"]
    if not withheld:
        pytest.skip("this processor has nothing that the level withholds")
    code = "import numba\nnumba.njit('int64()')(lambda: 1)\nimport moiety_kernels.cpu.instructions"
    done = run_limited("avx2", "-c", code)
    assert "numba already compiles with avx512" in done.stderr
