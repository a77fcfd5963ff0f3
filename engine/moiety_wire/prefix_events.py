"""Events of an engine's prefix cache: which blocks it has stored and which it has evicted, on all tiers together.

A block is named by 60 bits of its hash after the tenant's mark. The hash chain starts at the tenant's salt, so the
names of a tenant's blocks tell other tenants nothing. In a message, names are packed little-endian 64-bit integers.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import msgspec

from moiety_wire.block_hashes import MARK_BYTES

NAME_BYTES = 8  # in a message
UNUSED_BITS = 4  # of these bytes: CPython stores integers of up to 60 bits in 32 bytes, larger ones in 48
MAX_BLOCKS_PER_MESSAGE = 4096


class PrefixSubscription(msgspec.Struct, frozen=True, tag="prefix_subscription"):
    """Request of a gateway for a snapshot of the cached blocks and for all later events; also after a gap.

    Only engines whose card has `publishes_prefixes` accept it.
    """


class PrefixEvents(msgspec.Struct, frozen=True, tag="prefix_events"):
    """Blocks stored and evicted since the previous message. No block is in both lists.

    `seq` increases by one with each message of a session. `is_start`: a snapshot begins, and all that was known of the
    engine is void.
    """

    seq: int
    stored: bytes
    evicted: bytes = b""
    is_start: bool = False


def block_name(block_hash: bytes) -> int:
    """Return the name of a block in events, from its hash with the tenant's mark."""
    return int.from_bytes(block_hash[MARK_BYTES : MARK_BYTES + NAME_BYTES], "little") >> UNUSED_BITS


def pack_names(names: Iterable[int]) -> bytes:
    """Return block names as bytes, 8 for each."""
    packed = array("Q", names)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_names(data: bytes) -> array[int]:
    """Return the block names in `data`. Raises ValueError if its length is no multiple of 8."""
    names = array("Q")
    names.frombytes(data)
    if sys.byteorder == "big":
        names.byteswap()
    return names
