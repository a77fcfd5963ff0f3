"""Owners of a step's tokens, as the expert counts need them: tenant slot, weight of the class, and chunk of the plan.

T tokens of a step.
"""

from __future__ import annotations

import functools
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from moiety_engine.moe.tenants import NO_TENANT, OTHER_SLOT
from moiety_kernels.expert_count import MAX_SLOTS, PART_SHIFT, owner_code

_tenant_of = attrgetter("request.tenant")

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moiety_engine.moe.tenants import TenantSlots
    from moiety_engine.scheduling.plan import Chunk
    from moiety_engine.sequence import Sequence as TokenSequence


class DecodeOwners:
    """Owners of the rows of steps with one token per chunk, kept while the same sequences decode in the same order."""

    def __init__(self, tenants: TenantSlots | None) -> None:
        """Create the owners; without `tenants` nothing is counted."""
        self._tenants = tenants
        self._sequences: list[TokenSequence] = []  # of `_owner_T`
        self._owner_T = np.zeros(0, dtype=np.int64)
        self._num_reassigned = 0

    def of(self, sequences: list[TokenSequence], ones: Sequence[int]) -> np.ndarray:
        """Return the owner of each row, [T], int64, which must not be modified.

        `ones` is the number of tokens of each chunk.
        """
        tenants = self._tenants
        if tenants is None:
            return np.zeros(len(ones), dtype=np.int64)
        if sequences and sequences == self._sequences and self._num_reassigned == tenants.num_reassigned:
            tenants.count_step()
            return self._owner_T
        slots = tenants.slots_of(list(map(_tenant_of, sequences)), ones)
        if tenants.rank_weights is not None:  # the rank of a sequence can change
            weight_of = tenants.weight_of_rank
            weights = [weight_of(sequence.service.rank) for sequence in sequences]
            return np.array(list(map(owner_code, slots, weights, range(len(slots)))), dtype=np.int64)
        owner_T: np.ndarray = np.array(slots, dtype=np.int64) | _plain_codes(len(slots))
        is_kept = min(slots, default=NO_TENANT) > OTHER_SLOT  # the tokens of other tenants are counted in each step
        self._sequences, self._owner_T = sequences if is_kept else [], owner_T
        self._num_reassigned = tenants.num_reassigned
        return owner_T


def owners_of_parts(
    tenants: TenantSlots | None,
    sequences: Sequence[TokenSequence],
    num_tokens: Sequence[int],
    num_pads: Sequence[int],
    chunks: Iterable[Chunk],
) -> np.ndarray:
    """Return the owner of each row, [T], int64; padding rows get NO_TENANT.

    Part i has `num_tokens[i]` tokens of `sequences[i]` and then `num_pads[i]` padding rows. Each sequence has one chunk
    in `chunks`, all of the plan's.
    """
    lengths = np.array(num_tokens, dtype=np.int64) + np.array(num_pads, dtype=np.int64)
    if tenants is None:
        return np.full(int(lengths.sum()), NO_TENANT, dtype=np.int64)
    slots = tenants.slots_of([sequence.request.tenant for sequence in sequences], num_tokens)
    chunk_of = {chunk.sequence: number for number, chunk in enumerate(chunks)}
    weight_of = tenants.weight_of_rank
    codes = [
        owner_code(slot, weight_of(sequence.service.rank), chunk_of[sequence])
        for slot, sequence in zip(slots, sequences, strict=True)
    ]
    owner_T = np.repeat(np.array(codes, dtype=np.int64), lengths)
    if any(num_pads):
        for end, num_pad in zip(np.cumsum(lengths), num_pads, strict=True):
            owner_T[end - num_pad : end] = NO_TENANT
    return owner_T


def bytes_of_chunks(owner_T: np.ndarray, bytes_T: np.ndarray, num_chunks: int) -> np.ndarray:
    """Return the sums of the bytes of each chunk's tokens, int64; tokens without an owner do not count."""
    slot_T, chunk_T = owner_T & (MAX_SLOTS - 1), owner_T >> PART_SHIFT
    sums = np.zeros(num_chunks, dtype=np.int64)
    np.add.at(sums, chunk_T[slot_T != NO_TENANT], bytes_T[slot_T != NO_TENANT])
    return sums


@functools.cache
def _plain_codes(count: int) -> np.ndarray:
    """Return the owners of `count` parts without their slots, with a weight of 1. Do not modify the result."""
    return np.array([owner_code(0, 1, part) for part in range(count)], dtype=np.int64)
