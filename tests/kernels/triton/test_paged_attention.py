"""The Triton kernels of paged attention agree with their definition."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_kernels.kv_store.reference import kv_store
from moiety_kernels.paged_attention import decode, kernel, prefill, reference, softmax

Sequences = list[tuple[int, int]]  # (queries, context) of each


@dataclass(frozen=True)
class Case:
    """One call. Sequences of one query at the head of the batch are decoded."""

    sequences: Sequences
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    value_width: int | None = None
    places: int = 16
    window: int | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    decoded: int = 0


def arguments(case: Case, device: str) -> tuple[list[Any], dict[str, Any]]:
    """Random ones. Cache slots beyond each context, and blocks of nobody, are NaN or 127."""
    widths = [-(-context // case.places) for _, context in case.sequences]
    blocks = torch.randperm(sum(widths) + 3)
    kinds = [(case.width, "k"), (case.value_width or case.width, "v")]
    caches, scales = [], []
    quantised = case.cache_dtype in kernel.QUANTISED
    for width, _ in kinds:
        cache = torch.full((len(blocks), case.kv_heads, case.places, width), float("nan"))
        if quantised:
            cache.fill_(127)
        caches.append(cache)
        scales.append(torch.rand(case.kv_heads) * 0.1 + 0.05 if quantised else None)
    table = torch.full((len(widths), max(widths) + 2), 1 << 30, dtype=torch.int32)
    first = 0
    for s, ((_, context), count) in enumerate(zip(case.sequences, widths, strict=True)):
        table[s, :count] = blocks[first : first + count]
        first += count
        at = torch.arange(context)
        slots = table[s, at // case.places].long() * case.places + at % case.places
        rows = [torch.randn(context, case.kv_heads, width) for width, _ in kinds]
        if quantised:
            rows = [(row / scale[:, None]).round().clamp(-127, 127) for row, scale in zip(rows, scales, strict=True)]
        kv_store(*rows, *caches, slots)
    dtype = case.cache_dtype or case.dtype
    starts = torch.tensor([0, *torch.tensor([n for n, _ in case.sequences]).cumsum(0).tolist()], dtype=torch.int32)
    contexts = torch.tensor([context for _, context in case.sequences], dtype=torch.int32)
    tokens = int(starts[-1])
    q = torch.randn(tokens, case.heads + 1, case.width).to(device, case.dtype)[:, : case.heads]  # heads lie apart
    sinks = torch.randn(case.heads, device=device) * 3 if case.sinks else None
    moved = [tensor.to(device) for tensor in (starts, contexts, table)]
    args = [q, *(cache.to(dtype).to(device) for cache in caches), *moved, case.width**-0.5, case.window, sinks]
    extras = {"k_scale_G": scales[0], "v_scale_G": scales[1]}
    return args, {name: None if scale is None else scale.to(device) for name, scale in extras.items()}


def check(kernels: Any, case: Case, device: str) -> None:
    args, scales = arguments(case, device)
    longest = max(context for _, context in case.sequences)
    ours = kernels.paged_attention(*args, *scales.values(), num_decode=case.decoded, max_context=longest)
    expected = reference.paged_attention(*args, **scales)
    tolerance = {"rtol": 4e-3, "atol": 4e-3} if case.dtype is torch.float16 else {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(ours, expected, **tolerance)


RAGGED: Sequences = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 700), (3, 3), (130, 150), (1, 300), (0, 5), (40, 290)]
EVERYTHING = {
    "plain": Case(RAGGED),
    "decoded": Case(RAGGED, decoded=5),
    "half precision": Case(RAGGED, decoded=5, dtype=torch.float16, width=64),
    "window": Case(RAGGED, decoded=5, window=37),
    "a window of one": Case(RAGGED, decoded=5, window=1),
    "window and sinks": Case(RAGGED, decoded=5, window=200, sinks=True),
    "sinks": Case(RAGGED, decoded=5, sinks=True),
    "odd blocks": Case(RAGGED, decoded=5, places=5),
    "blocks of one": Case(RAGGED, decoded=5, places=1),
    "wide blocks": Case(RAGGED, decoded=5, places=256),
    "one group": Case(RAGGED, decoded=5, heads=7, kv_heads=1),
    "many heads a group": Case(RAGGED, decoded=5, heads=70, kv_heads=1),
    "no groups": Case(RAGGED, decoded=5, heads=3, kv_heads=3),
    "narrow values": Case(RAGGED, decoded=5, width=192, value_width=128),
    "eight bits": Case(RAGGED, decoded=5, cache_dtype=torch.float8_e4m3fn),
    "whole numbers": Case(RAGGED, decoded=5, cache_dtype=torch.int8, dtype=torch.float16),
}


@pytest.mark.parametrize("case", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_a_ragged_batch_agrees(case: Case, device: str) -> None:
    check(kernel, case, device)


@pytest.mark.parametrize("width", [20, 64, 80, 96, 112, 128, 192, 256])
def test_any_width_of_a_head_agrees(width: int, device: str) -> None:
    check(kernel, Case([(1, 1), (1, 200), (9, 70)], width=width, decoded=2), device)
