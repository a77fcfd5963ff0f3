"""Triton kernels, interpreted where there is no GPU. The kernels of a process are either interpreted or compiled, so
what compiles them runs in processes of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def fresh_numbers_on_poisoned_memory() -> Iterator[None]:
    """Numbers are the same every time, and what is allocated holds NaN: what a kernel leaves out is never right by
    chance. On a GPU, where torch would then refuse some products, it is memory that is likely to be allocated next."""
    torch.manual_seed(0)
    for size in (1 << 8, 1 << 12, 1 << 16, 1 << 18) if DEVICE == "cuda" else ():
        held = [torch.full((size,), float("nan"), device=DEVICE) for _ in range(4)]
        del held
    torch.use_deterministic_algorithms(DEVICE == "cpu")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def untouched() -> Callable[[int, torch.dtype], torch.Tensor]:
    """`untouched(size, dtype)`: memory that is reserved, and used only where it is written to."""

    def reserve(size: int, dtype: torch.dtype) -> torch.Tensor:
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            return torch.empty(size, dtype=dtype, device=DEVICE)
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = True

    return reserve


@pytest.fixture(autouse=True)
def interpreter_that_rounds_to_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own loses the carry into the exponent where numbers are rounded up to a power of two, and makes 64 of
    127.9; a GPU rounds as torch does."""
    if DEVICE != "cpu":
        return
    convert = interpreter._convert_float

    def convert_float(numbers: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.float32 and target == tl.float8e4nv:
            return torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(numbers, source, target, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


@pytest.fixture
def noticed() -> tuple[type[Exception], ...]:
    """What a check raises on a mutant: it disagrees, or the interpreter meets numbers that only garbage has."""
    return AssertionError, InterpreterError
