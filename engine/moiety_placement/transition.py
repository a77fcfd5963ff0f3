"""Transition of one layer's slots while tokens arrive: few weights at a time, never without an expert.

Dimension besides the package's: W writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moiety_placement.errors import BadNumbers
from moiety_placement.placement_table import EMPTY, Ints, Placement


@dataclass(frozen=True, slots=True)
class Write:
    """Write of another expert's weights into a slot, read from `source`, a slot that has them."""

    slot: int
    expert: int
    source: int


def transition(old: Placement, new: Placement, layer: int, *, most_writes: int) -> Iterator[list[Write]]:
    """Yield batches of about `most_writes` that lead a layer from its old slots to the new ones.

    After each batch every expert is in some slot, so tokens may be computed between any two. Within a batch all sources
    are read before any slot is written. A batch is longer than `most_writes` only where experts are exchanged in a
    cycle. A source is on the slot's own rank if that has the expert, otherwise on the rank that sends the least. Raises
    BadNumbers where a placement has empty slots or lacks an expert, or where the two differ in shape.
    """
    if most_writes < 1:
        raise BadNumbers(f"a batch needs at least one write, not {most_writes}")
    now_R, then_R = np.array(old.physical_to_logical_LR[layer]), new.physical_to_logical_LR[layer]
    if now_R.shape != then_R.shape or old.num_experts != new.num_experts or old.num_ranks != new.num_ranks:
        raise BadNumbers("a transition must not change the number of slots, experts or ranks of a layer")
    for slots_R in (now_R, then_R):
        if EMPTY in slots_R or len(np.unique(slots_R)) < old.num_experts:
            raise BadNumbers("a layer in use needs every expert in some slot and no empty slot")
    while (now_R != then_R).any():
        slots = _closed_batch(now_R, then_R, most_writes)
        yield _with_sources(now_R, then_R, slots, old.num_ranks)
        now_R[slots] = then_R[slots]


def _closed_batch(now_R: Ints, then_R: Ints, most_writes: int) -> list[int]:
    """Return slots that can be written together so that no expert is without a slot afterwards."""
    left = np.flatnonzero(now_R != then_R).tolist()
    counts_E = np.bincount(now_R)
    batch: list[int] = []
    gone = EMPTY  # the expert that has no slot after the current batch
    while left and (gone != EMPTY or len(batch) < most_writes):
        if gone != EMPTY:
            slot = next(slot for slot in left if then_R[slot] == gone)
        else:
            slot = next((slot for slot in left if counts_E[now_R[slot]] > 1), left[0])
        left.remove(slot)
        batch.append(slot)
        counts_E[now_R[slot]] -= 1
        counts_E[then_R[slot]] += 1
        gone = EMPTY if counts_E[now_R[slot]] else int(now_R[slot])
    return batch


def _with_sources(now_R: Ints, then_R: Ints, slots: list[int], num_ranks: int) -> list[Write]:
    of_rank = len(now_R) // num_ranks
    gives_G = np.zeros(num_ranks, dtype=np.int64)
    writes = []
    for slot in slots:
        own = slot // of_rank
        has_it = np.flatnonzero(now_R == then_R[slot]).tolist()
        source = min(has_it, key=lambda one: (one // of_rank != own, gives_G[one // of_rank], one))
        gives_G[source // of_rank] += source // of_rank != own
        writes.append(Write(slot, int(then_R[slot]), source))
    return writes
