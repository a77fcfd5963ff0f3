"""Triton kernels, interpreted where there is no GPU. The kernels of a process are either interpreted or compiled, so
what compiles them runs in processes of its own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from moiety_kernels.paged_attention import kernel as paged_attention
from moiety_kernels.paged_attention.kernels import decode, prefill

ATTENTION_FUNCTIONS = ("attend", "first_key", "keys_before", "store_lse", "prefill", "decode", "merge")
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
    torch.set_deterministic_debug_mode("error" if DEVICE == "cpu" else "default")
    yield
    torch.set_deterministic_debug_mode("default")  # the other way to say so imports a compiler for 3 s


@pytest.fixture
def untouched() -> Callable[[int, torch.dtype], torch.Tensor]:
    """`untouched(size, dtype)`: memory that is reserved, and used only where it is written to."""

    def reserve(size: int, dtype: torch.dtype) -> torch.Tensor:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            return torch.empty(size, dtype=dtype, device=DEVICE)
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]

    return reserve


@pytest.fixture(scope="session", autouse=True)
def interpreter_that_patches_the_language_once() -> Iterator[None]:
    """Triton's own looks through the members of its language at each launch and at each call of a device function, to
    replace those that are built in, though they are replaced already: a third of the time. Here the names of these are
    found once, and replaced once a launch; what numpy calls each type is found once, too. In a language whose members
    are replaced, `static_print` is Python's `print`."""
    patch_lang = interpreter._patch_lang
    patched = [tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base]
    builtins = {one: [name for name, value in inspect.getmembers(one) if tl.core.is_builtin(value)] for one in patched}

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name in builtins[owner]:
            if tl.core.is_builtin(member := getattr(owner, name)):
                interpreter._patch_attr(owner, name, member, builder, scope)

    def patch_lang_once(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        is_patched = languages and all(language.static_print is print for language in languages)
        return interpreter._LangPatchScope() if is_patched else patch_lang(fn)

    of_scalars = functools.cache(interpreter._get_np_dtype)
    of_pointers = interpreter._get_np_dtype(tl.pointer_type(tl.int8))

    def dtype_in_numpy(dtype: Any) -> Any:
        return of_pointers if dtype.scalar.is_ptr() else of_scalars(dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(interpreter, "_patch_builtin", patch_builtin)
            patch.setattr(interpreter, "_patch_lang", patch_lang_once)
            patch.setattr(interpreter, "_get_np_dtype", dtype_in_numpy)
        yield


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


@pytest.fixture(autouse=True)
def interpreter_that_sums_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own multiplies with numpy, whose order of sums depends on the shape, the BLAS library and the processor.
    A GPU's matrix instructions sum along K in one order whatever the shape: each element here is a sum from first to
    last, so that tests of equal bits hold the kernel to what it promises and not the processor's BLAS."""
    if DEVICE != "cpu":
        return

    def create_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = (
            interpreter._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16)
            if x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating()
            else x.data
            for x in (a, b)
        )
        total = np.zeros(d.data.shape, d.data.dtype)
        left, right = left.astype(total.dtype, copy=False), right.astype(total.dtype, copy=False)
        product = np.empty_like(total)
        for k in range(left.shape[-1]):
            np.multiply(left[..., :, k, None], right[..., k, None, :], out=product)
            total += product
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def noticed() -> tuple[type[Exception], ...]:
    """What a check raises on a mutant: it disagrees, or the interpreter meets numbers that only garbage has."""
    return AssertionError, InterpreterError


@pytest.fixture
def failing_mutant(mutated: Callable[..., ModuleType], noticed: tuple[type[Exception], ...]) -> FailingMutant:
    """`with failing_mutant(module, edit) as mutant`: the mutant's check within the context must fail."""

    @contextlib.contextmanager
    def failing(module: ModuleType, edit: Edit) -> Iterator[ModuleType]:
        mutant = mutated(module, *edit)
        with pytest.raises(noticed):
            yield mutant

    return failing


@pytest.fixture
def failing_attention(failing_mutant: FailingMutant, monkeypatch: pytest.MonkeyPatch) -> FailingMutant:
    """`with failing_attention(module, edit)`: as `failing_mutant`, with the functions of the mutant in the modules of
    paged attention that use them."""

    @contextlib.contextmanager
    def failing(module: ModuleType, edit: Edit) -> Iterator[ModuleType]:
        with failing_mutant(module, edit) as mutant:
            for user in (paged_attention, prefill, decode):
                for name in ATTENTION_FUNCTIONS:
                    if hasattr(mutant, name) and hasattr(user, name):
                        monkeypatch.setattr(user, name, getattr(mutant, name))
            yield mutant

    return failing
