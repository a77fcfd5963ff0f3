"""Emitted functions compute what their notation says, their declarations are checked, and the page that teaches them
shows the code as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numba import TypingError, njit

from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.values import LANES, BFloats, Float, Floats, Int

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/cpu-kernels.md"
SHOWN = ("cpu/vectors.py", "rms_norm/cpu.py")


def _blend(e: Emitter, row: Floats, count: Int, limit: Float, out: Floats) -> Float:
    """Emit out[i] = row[i] / 2 where row[i] < limit, else 3 - row[i]; return the sum of them."""
    limits, total = e.splat(limit), [e.constant(0.0)]
    for i in e.loop(count, LANES, total):
        values = row[i]
        out[i] = (values < limits).choose(values / 2.0, 3.0 - values)
        total[0] = total[0] + out[i]
    return e.sum(total[0])


blend = function("moiety_test_blend", _blend)


@njit()
def _call_blend(row: int, count: int, limit: float, out: int) -> float:
    return blend(out=out, row=row, limit=limit, count=count)


def test_a_function_called_by_name_computes_what_it_says() -> None:
    row, out = np.random.default_rng(0).standard_normal((2, 5 * LANES)).astype(np.float32)
    total = _call_blend(row.ctypes.data, len(row), 0.25, out.ctypes.data)
    expected = np.where(row < np.float32(0.25), row / 2, 3 - row)
    np.testing.assert_array_equal(out, expected)
    assert total == pytest.approx(float(expected.sum()), rel=1e-5)


def _count_up(e: Emitter, count: Int, out: Floats) -> None:
    total = [e.constant(1.0)]
    for _ in e.loop_if_any(count, 1, total):
        total[0] = total[0] + 1.0
    out[0] = total[0]


count_up = function("moiety_test_count_up", _count_up)


@njit()
def _call_count_up(count: int, out: int) -> None:
    count_up(count, out)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_loop_passes_values_on_as_often_as_it_runs(count: int) -> None:
    out = np.zeros(LANES, dtype=np.float32)
    _call_count_up(count, out.ctypes.data)
    assert out.tolist() == [1.0 + count] * LANES


def _through_bfloat16(e: Emitter, row: Floats, out: BFloats) -> None:
    out[0] = row[0]


through_bfloat16 = function("moiety_test_through_bfloat16", _through_bfloat16)


@njit()
def _call_through_bfloat16(row: int, out: int) -> None:
    through_bfloat16(row, out)


def test_floats_are_stored_as_the_nearest_bfloat16() -> None:
    row = np.random.default_rng(1).standard_normal(LANES).astype(np.float32)
    row[:3] = (np.nan, np.inf, 1.00390625)  # a tie: half-way between two
    out = torch.zeros(LANES, dtype=torch.bfloat16)
    _call_through_bfloat16(row.ctypes.data, out.data_ptr())
    torch.testing.assert_close(out, torch.from_numpy(row).bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_a_call_with_a_name_that_is_not_declared_fails_the_compilation() -> None:
    @njit()
    def call(at: int) -> None:
        count_up(count=1, output=at)

    with pytest.raises(TypingError, match="missing a required argument: 'out'"):
        call(0)


class Rows(NamedTuple):
    rows: int


def test_an_argument_that_no_emitted_function_takes_is_refused() -> None:
    def emit(e: Emitter, args: Rows) -> None:
        raise AssertionError(e, args)

    with pytest.raises(TypeError, match="'rows' is declared as"):
        function("moiety_test_refused", emit)


def test_the_page_on_cpu_kernels_shows_the_code_as_it_is() -> None:
    sources = [(ROOT / "kernels/moiety_kernels" / path).read_text(encoding="utf-8") for path in SHOWN]
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        assert any(block in source for source in sources), block


def test_the_emission_on_the_page_prints_the_instructions() -> None:
    (script,) = re.findall(r"<<'END'\n(.*?)END\n", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    printed: list[str] = []
    exec(script, {"print": lambda module: printed.append(str(module))})
    assert "llvm.fma" in printed[0]
