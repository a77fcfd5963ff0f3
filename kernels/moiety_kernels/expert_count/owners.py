"""Encoding of a token's owner as one integer: slot, weight and part."""

from __future__ import annotations

SLOT_BITS, WEIGHT_BITS = 8, 8
MAX_SLOTS = 1 << SLOT_BITS
MAX_WEIGHT = (1 << WEIGHT_BITS) - 1
SLOT_MASK, WEIGHT_MASK = MAX_SLOTS - 1, MAX_WEIGHT
PART_SHIFT = SLOT_BITS + WEIGHT_BITS


def owner_code(slot: int, weight: int, part: int) -> int:
    """Return the owner of a token: slot below MAX_SLOTS, weight of at most MAX_WEIGHT, and the part's number."""
    return slot | weight << SLOT_BITS | part << PART_SHIFT
