"""Which adapters give way to a new one, and how large the slots must be then. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moiety_engine.model.adapter_stacks import Key


@dataclass(frozen=True, slots=True)
class SlotRequirement:
    """What an adapter wants of every slot."""

    keys: frozenset[Key]
    rank: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """A layout that holds who stays and the new one. `evicted` are those of the idle ones that do not stay."""

    keys: frozenset[Key]
    rank: int
    num_slots: int
    evicted: tuple[str, ...]


Bytes = Callable[[Iterable["Key"], int, int], int]  # of products, slots and a rank


def find_room(
    new: SlotRequirement,
    in_use: Sequence[SlotRequirement],
    idle: Sequence[tuple[str, SlotRequirement]],
    *,
    num_bytes: Bytes,
    max_bytes: int,
    max_slots: int,
) -> SlotLayout | None:
    """The room with the fewest evictions, of `idle` ones from the first on; None while there is none. A layout is
    larger than it must be where memory allows, so that it seldom changes."""
    for num_evicted in range(len(idle) + 1):
        stay = [*in_use, *(need for _, need in idle[num_evicted:]), new]
        keys: frozenset[Key] = frozenset().union(*(need.keys for need in stay))
        rank = padded_rank(max(need.rank for need in stay))
        if len(stay) > max_slots or num_bytes(keys, len(stay), rank) > max_bytes:
            continue
        wished = min(max_slots, 1 << (len(stay) - 1).bit_length())
        num_slots = wished if num_bytes(keys, wished, rank) <= max_bytes else len(stay)
        return SlotLayout(keys, rank, num_slots, tuple(name for name, _ in idle[:num_evicted]))
    return None


def padded_rank(rank: int) -> int:
    """As slots have it: a power of two, at least 4, which kernels like."""
    return max(4, 1 << (rank - 1).bit_length())
