"""Kernels for instructions that this processor lacks run with these instructions emulated.

If the processor has them, the emulation is compared with them bit for bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import ir

from moiety_kernels.cpu import dots, paths
from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.emulated import add_products, looked_up, multiplied_words, rounded_pairs
from moiety_kernels.cpu.instructions import EMULATED, PAIRS_FEATURE, TILES_FEATURE, VARIABLE, WIDE, WORDS_FEATURE
from moiety_kernels.cpu.values import I16, LANES, VI32, Bytes, Vector

THERE = {
    TILES_FEATURE: paths.is_usable(paths.TILES),
    PAIRS_FEATURE: paths.is_usable(paths.PAIRS),
    WORDS_FEATURE: paths.is_usable(paths.WORDS),
}
MISSING = [feature for feature, is_there in THERE.items() if not is_there]
FILES = ("test_against_reference.py", "test_quantization.py", "test_attention_in_pairs.py", "test_cpu_mutants.py")
# those of the tests that need no instruction that others do not, too
PLAIN = "vectors or test_a_mutant or test_every_kernel"


def pytest_with(features: list[str], *args: str) -> tuple[int, int]:
    """Return how many tests passed and were skipped in a process in which these instructions are emulated."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", *args]
    done = subprocess.run(
        command, env=env | {VARIABLE: ",".join(features)}, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped)", done.stdout)}
    return counts.get("passed", 0), counts.get("skipped", 0)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.skipif(not MISSING, reason="this processor has all instructions that kernels are written with")
def test_kernels_for_instructions_that_are_not_there_agree_with_their_references(name: str) -> None:
    missing = "tiles" if MISSING == [TILES_FEATURE] else f"not ({PLAIN})"
    if name in ("test_attention_in_pairs.py", "test_cpu_mutants.py"):
        if PAIRS_FEATURE not in MISSING:
            pytest.skip("this processor multiplies in pairs, and the file's own tests have run")
        missing = f"not ({PLAIN})"
    passed, skipped = pytest_with(MISSING, str(Path(__file__).with_name(name)), "-k", missing)
    assert passed > 0
    assert skipped == 0, "with all of them emulated there is nothing to skip"


@pytest.mark.timeout(600)
def test_each_instruction_emulated_gives_a_product_within_the_bounds_of_the_real_one() -> None:
    """A few shapes run with all instructions emulated, on every processor."""
    few = "test_a_product_is_that_with_the_weight_it_stands_for and not vectors and 7-128-1-"
    passed, skipped = pytest_with(list(THERE), str(Path(__file__).with_name("test_quantization.py")), "-k", few)
    assert passed >= 3
    assert skipped == 0


def test_instructions_that_cannot_be_emulated_are_refused() -> None:
    command = [sys.executable, "-c", "import moiety_kernels.cpu.instructions"]
    env = os.environ | {VARIABLE: "amx-bf16,sve"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert f"{VARIABLE} is 'amx-bf16,sve'; it takes some of" in done.stderr


_WORDS = ir.VectorType(I16, 2 * LANES)


def applied(name: str, emit: Callable[..., Vector], kinds: list[Any], *inputs: np.ndarray) -> Any:
    """What the code gives for vectors of these kinds, 64 bytes each, as words."""

    def write_two(e: Emitter, a: Bytes, b: Bytes, target: Bytes) -> None:
        target[0] = emit(e, *(at.load(0, kind) for at, kind in zip((a, b), kinds, strict=True)))

    def write_three(e: Emitter, a: Bytes, b: Bytes, c: Bytes, target: Bytes) -> None:
        target[0] = emit(e, *(at.load(0, kind) for at, kind in zip((a, b, c), kinds, strict=True)))

    code = function(name, {2: write_two, 3: write_three}[len(inputs)])
    addresses = ", ".join(f"a{i}" for i in range(len(inputs) + 1))
    scope: dict[str, Any] = {"code": code}
    exec(f"def call({addresses}):\n    code({addresses})", scope)
    from numba import njit

    out = np.zeros(64, dtype=np.uint8)
    njit(scope["call"])(*(one.ctypes.data for one in (*inputs, out)))
    return out.view(np.uint16)


def some_floats(seed: int) -> np.ndarray:
    """16 floats of all sizes, ties among them, and some that are no numbers or denormal."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, LANES, dtype=np.uint64).astype(np.uint32)
    bits[:4] = (bits[:4] & 0xFFFF_0000) | 0x8000  # half-way between two
    bits[4:8] = np.array([0x7FC0_0001, 0x7F80_0000, 0x0000_0123, 0x8000_0000], dtype=np.uint32)
    return bits.view(np.float32)


needs_lanes = pytest.mark.skipif(not WIDE, reason="vectors of 8 floats: the processes above have 16, of two")
VF = ir.VectorType(ir.FloatType(), LANES)


@needs_lanes
@pytest.mark.parametrize("seed", range(4))
def test_numbers_are_rounded_to_pairs_as_torch_and_the_processor_do(seed: int) -> None:
    low, high = some_floats(seed), some_floats(seed + 100)
    ours = applied(f"round_{seed}", rounded_pairs, [VF, VF], low, high)
    both = torch.from_numpy(np.concatenate([low, high]))
    expected = torch.where(both.abs() < torch.finfo(torch.float32).tiny, both * 0, both).bfloat16()
    found = torch.from_numpy(ours.view(np.int16).copy()).view(torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    if THERE[PAIRS_FEATURE] and PAIRS_FEATURE not in EMULATED:
        theirs = applied(f"round_there_{seed}", dots.narrowed, [VF, VF], low, high)
        assert ours.tolist() == theirs.tolist()


@needs_lanes
@pytest.mark.parametrize("seed", range(4))
def test_pairs_are_multiplied_as_the_processor_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = (torch.from_numpy(rng.standard_normal(2 * LANES)).bfloat16() for _ in range(2))
    sums = rng.standard_normal(LANES).astype(np.float32)
    given = [sums, *(one.view(torch.int16).numpy() for one in (x, w))]
    ours = applied(f"pairs_{seed}", add_products, [VF, VI32, VI32], *given).view(np.float32)
    products = (x.double() * w.double()).view(LANES, 2).sum(1).numpy()
    np.testing.assert_allclose(ours, sums + products, rtol=1e-6, atol=1e-6)
    if THERE[PAIRS_FEATURE] and PAIRS_FEATURE not in EMULATED:
        kinds = [VF, VI32, VI32]
        theirs = applied(f"pairs_there_{seed}", dots.add_pairs, kinds, *given).view(np.float32)
        assert ours.tolist() == theirs.tolist()


@needs_lanes
def test_words_are_multiplied_and_looked_up_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-(1 << 15), 1 << 15, 2 * LANES).astype(np.int16) for _ in range(2))
    x[:2] = w[:2] = -(1 << 15) + 1
    found = applied("words", multiplied_words, [_WORDS, _WORDS], x, w).view(np.int32)
    assert found.tolist() == (x.astype(np.int64) * w).reshape(LANES, 2).sum(1).tolist()
    table, index = (
        rng.integers(-100, 100, 2 * LANES).astype(np.int16),
        rng.integers(0, 1 << 15, 2 * LANES).astype(np.int16),
    )
    found = applied("looked_up", looked_up, [_WORDS, _WORDS], table, index).view(np.int16)
    assert found.tolist() == table[index & 31].tolist()
