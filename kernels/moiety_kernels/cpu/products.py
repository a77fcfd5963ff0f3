"""The ways to multiply rows with a weight, each compiled by itself and called through its address.

A kernel that multiplies gets the product as an argument. A way is compiled when a weight first needs it, once for all
kernels, and not into each of them: most of the time of a first start is spent there.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.compiling import function_address, jit
from moiety_kernels.cpu.dots import GROUP, eights, grouped_eights, pairs
from moiety_kernels.cpu.gemm import (
    BFLOAT16,
    BFLOAT16_TILES,
    FLOAT32,
    PACKED,
    PACKED_WORDS,
    PANEL_BYTES,
    PANEL_PAD,
    WIDE_AT,
    WIDEN_ROWS,
    chunk_of,
    multiply_narrow,
    multiply_tiles,
    multiply_wide,
    row_block,
)
from moiety_kernels.cpu.memory import call_product
from moiety_kernels.cpu.packed import multiply_packed
from moiety_kernels.cpu.pair_fours import (
    fours,
    half_fours,
    offset_fours,
    offset_pairs,
    whole_fours,
    whole_offset_fours,
)
from moiety_kernels.cpu.structs import Address, Int64
from moiety_kernels.cpu.unpacking import E2M1_HALVES, E4M3, INT4, INT4_OFFSETS, INT8, PLAIN, WHOLE_ROW, number_format
from moiety_kernels.cpu.vectors import TILE_COLS, widen_row
from moiety_kernels.cpu.word_fours import (
    dots_32,
    dots_32_offsets,
    dots_64,
    dots_64_offsets,
    dots_128,
    dots_128_offsets,
    last_32,
    last_32_offsets,
    last_64,
    last_64_offsets,
    last_128,
    last_128_offsets,
    multiply_fours,
    sums_32,
    sums_32_offsets,
    sums_64,
    sums_64_offsets,
    sums_128,
    sums_128_offsets,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_kernels.quantization.weight import WeightFormat


class Product(NamedTuple):
    """A way to multiply, as kernels read it."""

    kind: Int64  # of `gemm.product_kind`
    function: Address  # of the arguments of `multiply_both`


@functools.cache
def product_of(kind: int, stored: torch.dtype | WeightFormat) -> Product:
    """Return the way to multiply weights of a product kind, stored as said; compile it if it is new."""
    numbers, shift = PLAIN, 0
    if kind >= PACKED and not isinstance(stored, torch.dtype):
        numbers, shift = number_format(stored)
    function = _FUNCTIONS[kind] if kind < PACKED else _packed(kind, numbers, shift)
    return Product(kind, function_address(function, _NUM_ARGS))


class LinearPlan(NamedTuple):
    """The division of a product with N outputs into tasks."""

    product: Product
    block: int  # rows per task
    chunk: int  # outputs per task
    num_chunks: int
    num_tasks: int


@functools.lru_cache(maxsize=4096)
def plan_of(
    kind: int, stored: torch.dtype | WeightFormat, m: int, n: int, k: int, threads: int, heads: int = 1
) -> LinearPlan:
    """Return the plan of M rows · N outputs of K inputs for each of `heads`, for weights of a product kind."""
    block = row_block(kind, k)
    num_items = heads * -(-m // block)
    chunk = chunk_of(kind, stored, k, n, m, num_items, 1, threads)
    num_chunks = -(-n // chunk)
    return LinearPlan(product_of(kind, stored), block, chunk, num_chunks, num_items * num_chunks)


def _packed(kind: int, numbers: int, shift: int) -> Callable[..., None]:
    """Return the function that multiplies packed rows with a weight of a number format."""
    if numbers == INT8:
        return _in_eights if shift == WHOLE_ROW else _in_grouped_eights
    if kind == PACKED_WORDS and numbers in (INT4, INT4_OFFSETS):
        return _WORD_FOURS[min(1 << shift, GROUP), numbers == INT4_OFFSETS]
    if numbers in (PLAIN, E4M3):  # whose rows are unpacked before they are multiplied
        return _in_pairs
    if numbers in (INT4, INT4_OFFSETS) and 1 << shift >= GROUP:
        return _in_whole_offset_fours if numbers == INT4_OFFSETS else _in_whole_fours
    return {E2M1_HALVES: _in_half_fours, INT4_OFFSETS: _in_offset_fours}.get(numbers, _in_fours)


@jit
def multiply(
    product: Product, rows: int, m: int, w: int, n: int, k: int, out: int, out_stride: int, scratch: int
) -> None:
    """Compute out[:m, :n] = rows · wᵀ.

    `rows` is the address of m row addresses, `w` the return value of `weight_rows`.
    """
    call_product(product.function, rows, m, w, 0, n, k, out, 0, out_stride, scratch)


@jit
def multiply_both(
    product: Product, rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    """Run `multiply` with two weights of one kind and size, into two outputs of one stride."""
    call_product(product.function, rows, m, w, other_w, n, k, out, other_out, out_stride, scratch)


def _on_tiles(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_tiles(rows, m, w, other_w, n, k, out, other_out, out_stride, scratch)


def _in_pairs(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_packed(pairs, pairs, rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT)


def _in_fours(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_packed(fours, pairs, rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT)


def _in_half_fours(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_packed(half_fours, pairs, rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT)


def _in_offset_fours(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_packed(
        offset_fours, offset_pairs, rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT
    )


def _in_whole_fours(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_packed(whole_fours, pairs, rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT)


def _in_whole_offset_fours(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_packed(
        whole_offset_fours, offset_pairs, rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT
    )


def _in_eights(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_packed(eights, eights, rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT)


def _in_grouped_eights(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_packed(
        grouped_eights, grouped_eights, rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT
    )


def _in_word_fours_32(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_fours(
        dots_32, sums_32, last_32, 4, 1,
        rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT,
    )  # fmt: skip


def _in_word_fours_32_offsets(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_fours(
        dots_32_offsets, sums_32_offsets, last_32_offsets, 8, 2,
        rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT,
    )  # fmt: skip


def _in_word_fours_64(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_fours(
        dots_64, sums_64, last_64, 2, 1,
        rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT,
    )  # fmt: skip


def _in_word_fours_64_offsets(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_fours(
        dots_64_offsets, sums_64_offsets, last_64_offsets, 4, 2,
        rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT,
    )  # fmt: skip


def _in_word_fours_128(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_fours(
        dots_128, sums_128, last_128, 1, 1,
        rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT,
    )  # fmt: skip


def _in_word_fours_128_offsets(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    multiply_fours(
        dots_128_offsets, sums_128_offsets, last_128_offsets, 2, 2,
        rows, m, w, other_w, n, k, out, other_out, out_stride, scratch + WIDE_AT,
    )  # fmt: skip


def _with_float32(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    _by_panels(rows, m, w, False, n, k, out, out_stride, scratch)
    if other_w:
        _by_panels(rows, m, other_w, False, n, k, other_out, out_stride, scratch)


def _with_bfloat16(
    rows: int, m: int, w: int, other_w: int, n: int, k: int,
    out: int, other_out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    for turn in range(2 if other_w else 1):
        weight, target = (other_w, other_out) if turn else (w, out)
        if m < WIDEN_ROWS:
            multiply_narrow(rows, m, weight, n, k, target, out_stride)
        else:
            _by_panels(rows, m, weight, True, n, k, target, out_stride, scratch)


@jit
def _by_panels(
    rows: int, m: int, w: int, is_narrow: bool, n: int, k: int, out: int, out_stride: int, scratch: int
) -> None:
    """Multiply with as many weight rows at a time as fit in the cache, widened there from bfloat16."""
    wide, wide_stride = scratch + WIDE_AT, 4 * k + PANEL_PAD
    panel = max(TILE_COLS, PANEL_BYTES // wide_stride // TILE_COLS * TILE_COLS)
    for j in range(0, n, panel):
        count = min(panel, n - j)
        if is_narrow:
            for r in range(count):
                widen_row(w + 2 * (j + r) * k, k, wide + r * wide_stride)
            multiply_wide(rows, m, wide, wide_stride, count, k, out + 4 * j, out_stride)
        else:
            multiply_wide(rows, m, w + 4 * j * k, 4 * k, count, k, out + 4 * j, out_stride)


_NUM_ARGS = 10
_FUNCTIONS: dict[int, Callable[..., None]] = {
    FLOAT32: _with_float32,
    BFLOAT16: _with_bfloat16,
    BFLOAT16_TILES: _on_tiles,
}
# by the inputs that share a scale, of each GROUP, and whether there are offsets
_WORD_FOURS: dict[tuple[int, bool], Callable[..., None]] = {
    (32, False): _in_word_fours_32,
    (64, False): _in_word_fours_64,
    (128, False): _in_word_fours_128,
    (32, True): _in_word_fours_32_offsets,
    (64, True): _in_word_fours_64_offsets,
    (128, True): _in_word_fours_128_offsets,
}
