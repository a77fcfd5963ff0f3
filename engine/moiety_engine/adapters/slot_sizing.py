"""Layout of adapter slots: the adapters to evict for a new one, and the resulting slot size. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moiety_engine.model.adapter_stacks import Key


@dataclass(frozen=True, slots=True)
class SlotRequirement:
    """Products and rank that an adapter requires of every slot."""

    keys: frozenset[Key]
    rank: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Layout that holds the remaining adapters and the new one. `evicted`: idle adapters to evict."""

    keys: frozenset[Key]
    rank: int
    num_slots: int
    evicted: tuple[str, ...]


Bytes = Callable[[Iterable["Key"], int, int], int]  # (products, slots, rank) → bytes


def find_layout(
    new: SlotRequirement,
    in_use: Sequence[SlotRequirement],
    idle: Sequence[tuple[str, SlotRequirement]],
    *,
    num_bytes: Bytes,
    max_bytes: int,
    max_slots: int,
) -> SlotLayout | None:
    """Return the layout with the fewest evictions, taken from the front of `idle`; None if no layout fits.

    If memory allows, the layout is larger than necessary, so that it seldom changes.
    """
    for num_evicted in range(len(idle) + 1):
        stay = [*in_use, *(need for _, need in idle[num_evicted:]), new]
        keys: frozenset[Key] = frozenset().union(*(need.keys for need in stay))
        rank = padded_rank(max(need.rank for need in stay))
        if len(stay) > max_slots or num_bytes(keys, len(stay), rank) > max_bytes:
            continue
        wanted = min(max_slots, 1 << (len(stay) - 1).bit_length())
        num_slots = wanted if num_bytes(keys, wanted, rank) <= max_bytes else len(stay)
        return SlotLayout(keys, rank, num_slots, tuple(name for name, _ in idle[:num_evicted]))
    return None


def padded_rank(rank: int) -> int:
    """Return the rank of slots for an adapter of this rank: a power of two, at least 4, which suits the kernels."""
    return max(4, 1 << (rank - 1).bit_length())
