"""Launch configuration of the attention kernels: tiles and context splits. Imports neither torch nor Triton.

The sizes are those at which no variant spills on Hopper (`moiety_kernels.gpu.report`); none has been timed yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_WIDTH = 256  # of keys or values that are loaded separately
_PREFILL_ROWS = 128
SPAN = 256  # range of decoding sequences without recompilation
MERGED_ROWS = 8
EVERYTHING, SLIDING, CHUNKS = range(3)  # positions up to a query's own, the last of them, or those of its chunk
_MIN_KEYS = 16  # fewest keys of a matrix instruction


@dataclass(frozen=True, slots=True)
class Device:
    """Properties of a GPU that determine the tiles."""

    num_sms: int
    shared_bytes: int  # limit of one program
    reads_shared: bool = True  # its matrix units read operands from shared memory, not from registers


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of one attention layer."""

    num_kv_heads: int
    group: int  # query heads per key-value head
    key_width: int
    value_width: int
    query_bytes: int  # per entry
    cache_bytes: int
    windowed: int  # EVERYTHING, SLIDING or CHUNKS: what a query sees of its context
    shared: bool  # a value is the first part of its key and is not loaded again
    num_shards: int = 1  # caches among which the positions are divided

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


@dataclass(frozen=True, slots=True)
class Tiles:
    """Constants of a kernel, in Triton's terms: BM rows, BN keys, and the parts of the widths."""

    rows: int
    keys: int
    key_parts: tuple[int, int]
    value_parts: tuple[int, int]
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Splits:
    """Split of a decoding sequence's context. Nothing here depends on the batch."""

    least: int  # fewest positions of a split
    most: int  # most splits of a sequence

    def bound(self, max_seen: int) -> int:
        """Return the most splits of a sequence that sees `max_seen` positions or fewer."""
        return max(1, min(self.most, -(-max_seen // self.least)))


def parts(width: int) -> tuple[int, int]:
    """Return two powers of two, the second possibly 0, whose sum exceeds `width` as little as possible."""
    first = max(16, 1 << width.bit_length() - 1)
    if first >= width:
        return first, 0
    second = max(16, 1 << (width - first - 1).bit_length())
    return (first, second) if second < first else (2 * first, 0)


def prefill_tiles(shape: Shape, device: Device) -> Tiles:
    """Return the tiles for prefill, which the matrix units bound: as many keys at once as registers allow."""
    key_parts, value_parts = parts(shape.key_width), parts(shape.value_width)
    if shape.shared:
        return _shared_tiles(shape, device)
    width, rows = max(sum(key_parts), sum(value_parts)), _PREFILL_ROWS
    if width > 192 and shape.cache_bytes == 1:  # converted in registers, of which wide sums leave few
        rows, keys, num_stages = 64, 16, 2
    elif width > 192:
        keys, num_stages = 32, 2
    elif not device.reads_shared or (width > 128 and shape.cache_bytes == 1):
        keys, num_stages = 32, 3
    elif width > 128 or shape.windowed or shape.cache_bytes == 1 or shape.num_shards > 1:
        keys, num_stages = 64, 3
    else:
        keys, num_stages = 128, 3
    return _fitting(Tiles(rows, keys, key_parts, value_parts, 8, num_stages), shape, device)


def decode_tiles(shape: Shape, device: Device) -> Tiles:
    """Return the tiles for decode, which memory bounds: several programs per multiprocessor load at once."""
    if shape.shared:
        return _shared_tiles(shape, device)
    width = max(shape.key_width, shape.value_width)
    rows = min(64, max(16, _power_of_two(shape.group)))
    # Up to a width of 128, a half-wasted product costs less than the registers of a second part.
    cut = parts if width > 128 else _whole
    limits = {64: (128, 4, 2), 128: (64, 4, 2), 192: (32, 4, 2), MAX_WIDTH: (64, 8, 3)}
    keys, num_warps, num_stages = next(chosen for limit, chosen in limits.items() if width <= limit)
    key_parts, value_parts = cut(shape.key_width), cut(shape.value_width)
    return _fitting(Tiles(rows, keys, key_parts, value_parts, num_warps, num_stages), shape, device)


def _shared_tiles(shape: Shape, device: Device) -> Tiles:
    """Return the tiles for rows so wide that their sums fill most registers; half the size if rows are converted."""
    rows, keys = (64, 32) if shape.cache_bytes == shape.query_bytes else (32, 16)
    return _fitting(Tiles(rows, keys, parts(shape.key_width), parts(shape.value_width), 8, 2), shape, device)


def splits(shape: Shape) -> Splits:
    """Return the context split of a layer.

    Splits are long enough that the partial results, float32 rows of all heads, are few bytes beside the keys and values
    read, and short enough that one sequence alone has a program per multiprocessor once its context is long.
    """
    if shape.shared:
        return Splits(max(256, _up(4 * shape.group, 64)), 32)
    return Splits(max(128, _up(16 * shape.group, 128)), min(64, max(8, 128 // shape.num_kv_heads)))


def decode_programs(items: int, tiles: Tiles, shape: Shape, device: Device) -> int:
    """Return how many programs share `items`: as many as run at once."""
    by_shared = device.shared_bytes // _shared_bytes(tiles, shape)
    by_registers = 12 // tiles.num_warps  # at about 160 registers per thread
    return max(1, min(items, device.num_sms * max(1, min(by_shared, by_registers))))


def constants(shape: Shape, tiles: Tiles) -> dict[str, Any]:
    """Return the compile-time constants of prefill and decode."""
    return {
        "GROUP": shape.group,
        "D": shape.key_width,
        "D0": tiles.key_parts[0],
        "D1": tiles.key_parts[1],
        "V": shape.value_width,
        "V0": tiles.value_parts[0],
        "V1": tiles.value_parts[1],
        "SHARED": shape.shared,
        "WINDOWED": shape.windowed,
        "SHARDS": shape.num_shards,
        "BM": tiles.rows,
        "BN": tiles.keys,
    }


def constants_of_merge(shape: Shape, tiles: Tiles) -> dict[str, Any]:
    """Return the compile-time constants of the merge after a decode with `tiles`."""
    first, second = parts(shape.value_width)
    known = constants(shape, tiles)
    return {name: known[name] for name in ("V", "SHARED", "WINDOWED", "SHARDS", "BN")} | {
        "V0": first,
        "V1": second,
        "ROWS": MERGED_ROWS,
    }


def _fitting(tiles: Tiles, shape: Shape, device: Device) -> Tiles:
    """Return the tiles with fewer keys at once if shared memory is short."""
    while _shared_bytes(tiles, shape) > device.shared_bytes and tiles.keys > _MIN_KEYS:
        tiles = Tiles(
            tiles.rows, tiles.keys // 2, tiles.key_parts, tiles.value_parts, tiles.num_warps, tiles.num_stages
        )
    return tiles


def _shared_bytes(tiles: Tiles, shape: Shape) -> int:
    """Return the bytes of queries, of keys and values of two steps, and of their blocks' ids."""
    keys, values = sum(tiles.key_parts), 0 if shape.shared else sum(tiles.value_parts)
    return shape.query_bytes * (tiles.rows * keys + 2 * tiles.keys * (keys + values)) + 8 * tiles.keys


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _whole(width: int) -> tuple[int, int]:
    return max(16, _power_of_two(width)), 0


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
