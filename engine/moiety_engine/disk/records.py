"""Format of a tier file: a header with the owner of the blocks, then the blocks, all of one size.

The header holds a digest of each block, computed with the block's hash and the tier's identity, and ends with its own
digest. So a torn file, a file of another model or of another owner is recognized and never gives wrong keys and values.
The end of the file records until when it is retained for a conversation that is expected to continue; only this part
changes. It has its own digest, so that a kill during the change loses only the retention.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

import msgspec

MAGIC = b"MOIETYKV"
DIGEST_BYTES = 16
_LENGTH_BYTES = 4
_KEPT = struct.Struct("<dd")
KEPT_BYTES = _KEPT.size + DIGEST_BYTES
_MAX_HEADER_BYTES = 1 << 20
RANK_BYTES = 2  # at the end of an identity: the rank; the rest is the same on all ranks

Buffer = memoryview


class BadFile(Exception):
    """The file is not of this tier, or is incomplete."""


class Kept(NamedTuple):
    """Retention for a conversation that is expected to continue: its end in unix seconds, and the tenant's weight."""

    until_s: float
    weight: float


class RecordHeader(msgspec.Struct, frozen=True, array_like=True):
    identity: bytes
    owner: bytes  # `owner_tag` of the tenant whose request left the blocks
    block_bytes: int
    hashes: list[bytes]
    digests: list[bytes]


def owner_tag(tenant_id: str, identity: bytes) -> bytes:
    """Return the tag that finds a tenant's files without revealing the tenant's name. It is the same on all ranks."""
    key = identity[:-RANK_BYTES]
    return blake2b(tenant_id.encode(), digest_size=DIGEST_BYTES, key=key, person=b"moiety-owner").digest()


def digest_of(block: Buffer, block_hash: bytes, identity: bytes) -> bytes:
    return blake2b(block, digest_size=DIGEST_BYTES, key=block_hash + identity).digest()


def write_file(
    file: BinaryIO, identity: bytes, owner: bytes, hashes: Sequence[bytes], blocks: Sequence[Buffer], kept: Kept | None
) -> int:
    """Write a file; return its size in bytes."""
    digests = [digest_of(block, one, identity) for one, block in zip(hashes, blocks, strict=True)]
    header = msgspec.msgpack.encode(RecordHeader(identity, owner, len(blocks[0]), list(hashes), digests))
    head = MAGIC + len(header).to_bytes(_LENGTH_BYTES, "little") + header
    head += blake2b(head, digest_size=DIGEST_BYTES).digest()
    file.write(head)
    for block in blocks:
        file.write(block)
    file.write(_encode_kept(kept))
    return len(head) + sum(len(block) for block in blocks) + KEPT_BYTES


def write_kept(file: BinaryIO, kept: Kept) -> None:
    """Overwrite the retention of an existing file, opened for reading and writing."""
    file.seek(-KEPT_BYTES, os.SEEK_END)
    file.write(_encode_kept(kept))


def read_kept(file: BinaryIO) -> Kept | None:
    """Return the retention; None where there is none or it is unreadable."""
    file.seek(-KEPT_BYTES, os.SEEK_END)
    found = file.read(KEPT_BYTES)
    kept = Kept(*_KEPT.unpack(found[: _KEPT.size]))
    return kept if kept.until_s > 0 and found == _encode_kept(kept) else None


def _encode_kept(kept: Kept | None) -> bytes:
    packed = _KEPT.pack(*(kept or Kept(0.0, 0.0)))
    return packed + blake2b(packed, digest_size=DIGEST_BYTES, person=b"moiety-kept").digest()


def read_header(file: BinaryIO, identity: bytes, block_bytes: int) -> tuple[RecordHeader, int]:
    """Return the header and the offset of the first block, checked against identity and file size. Raises BadFile."""
    header, start = read_head(file)
    num_blocks = len(header.hashes)
    if (header.identity, header.block_bytes) != (identity, block_bytes) or len(header.digests) != num_blocks:
        raise BadFile("it belongs to another model")
    if os.fstat(file.fileno()).st_size != start + num_blocks * block_bytes + KEPT_BYTES:
        raise BadFile("its size differs from its header")
    return header, start


def read_head(file: BinaryIO) -> tuple[RecordHeader, int]:
    """Return the header, for any model, and the offset of its end. Raises BadFile."""
    begin = len(MAGIC) + _LENGTH_BYTES
    head = file.read(begin)
    length = int.from_bytes(head[len(MAGIC) :], "little")
    if len(head) < begin or head[: len(MAGIC)] != MAGIC or length > _MAX_HEADER_BYTES:
        raise BadFile("it is not a file of this cache")
    rest = file.read(length + DIGEST_BYTES)
    if blake2b(head + rest[:length], digest_size=DIGEST_BYTES).digest() != rest[length:]:
        raise BadFile("its header is damaged")
    try:
        header = msgspec.msgpack.decode(rest[:length], type=RecordHeader)
    except msgspec.MsgspecError as exc:
        raise BadFile("its header has another format") from exc
    return header, begin + length + DIGEST_BYTES


def read_blocks(file: BinaryIO, identity: bytes, wanted: Sequence[tuple[bytes, Buffer]]) -> None:
    """Fill each buffer with the block of its hash, verified. Raises BadFile; the buffers are then invalid."""
    header, start = read_header(file, identity, len(wanted[0][1]))
    place_of = {one: place for place, one in enumerate(header.hashes)}
    for block_hash, target in wanted:
        place = place_of.get(block_hash)
        if place is None:
            raise BadFile("a block is missing")
        num_read = os.preadv(file.fileno(), [target], start + place * len(target))
        if num_read != len(target) or digest_of(target, block_hash, identity) != header.digests[place]:
            raise BadFile("a block is damaged")
