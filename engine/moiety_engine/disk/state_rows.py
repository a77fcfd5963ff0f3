"""Recurrent states in the disk tier: the state after a block is stored in pieces of a block's size, like blocks.

A piece has a key that follows from the block's hash, and a number after those of the device's blocks, so that rows,
files and ranks treat blocks and pieces alike. A state is read into a slot piece by piece, and is a snapshot once it is
whole.

N blocks, P pieces of a state.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from moiety_engine.runner.kv_swap import HostKv
from moiety_wire.block_hashes import HASH_BYTES, MARK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch import Tensor

    from moiety_engine.cache.state_slots import StateSlots
    from moiety_engine.disk.index import DiskIndex
    from moiety_engine.model.batch import KvCache

MIN_KEYS = 4096  # that are remembered before unused ones are looked for


def num_state_pieces(kv: KvCache) -> int:
    """Return the number of pieces of a state; 0 without recurrent layers."""
    return -(-_state_bytes(kv) // HostKv.bytes_of_a_block(kv)) if kv.num_state_slots else 0


def _state_bytes(kv: KvCache) -> int:
    parts = (part for layer in kv.states for part in layer.parts)
    return sum(part[0].numel() * part.element_size() for part in parts)


def piece_keys(block_hash: bytes, num_pieces: int) -> list[bytes]:
    """Return the keys of the pieces of the state after a block; they keep the mark of its tenant."""
    mark = block_hash[:MARK_BYTES]
    return [
        mark + blake2b(block_hash + piece.to_bytes(4, "big"), digest_size=HASH_BYTES, person=b"moiety-state").digest()
        for piece in range(num_pieces)
    ]


class HostKvWithStates(HostKv):
    """Host memory of rows for blocks and for pieces of states.

    Number N + slot · P + piece stands for a piece on the device.
    """

    def __init__(self, kv: KvCache, num_blocks: int, *, staging_bytes: int | None = None) -> None:
        super().__init__(kv, num_blocks, staging_bytes=staging_bytes)
        self._num_pieces = num_state_pieces(kv)
        self._parts: list[tuple[int, Tensor]] = []  # first byte of each part in a state, and the bytes of all slots
        first = 0
        for part in (part for layer in kv.states for part in layer.parts):
            of_slots = part.flatten(1).view(torch.uint8)
            self._parts.append((first, of_slots))
            first += of_slots.shape[1]

    @torch.inference_mode()
    def run(self, outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> None:
        num_blocks = self._kv.num_blocks
        super().run([pair for pair in outs if pair[0] < num_blocks], [pair for pair in ins if pair[1] < num_blocks])
        state_outs = [(one - num_blocks, row) for one, row in outs if one >= num_blocks]
        state_ins = [(row, one - num_blocks) for row, one in ins if one >= num_blocks]
        if not state_outs and not state_ins:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._on_stream():
            for piece, row in state_outs:
                for on_device, on_host in self._overlaps(piece, row):
                    on_host.copy_(on_device, non_blocking=True)
            for row, piece in state_ins:
                for on_device, on_host in self._overlaps(piece, row):
                    on_device.copy_(on_host, non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _overlaps(self, number: int, row: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield the ranges of a piece: in a part of the state on the device, and in a row."""
        slot, piece = divmod(number, self._num_pieces)
        begin = piece * self.block_bytes
        end = begin + self.block_bytes
        slab, place = divmod(row, self._rows_per_slab)
        row_bytes = self._slabs_HE[slab][place].view(torch.uint8)
        for first, of_slots in self._parts:
            low, high = max(begin, first), min(end, first + of_slots.shape[1])
            if low < high:
                yield of_slots[slot, low - first : high - first], row_bytes[low - begin : high - begin]


class StateRestores:
    """States of one rank group between device and disk. Used by the step loop's thread only."""

    def __init__(self, states: StateSlots, num_blocks: int, num_pieces: int) -> None:
        self._states, self._num_blocks, self.num_pieces = states, num_blocks, num_pieces
        self._wanted: dict[bytes, tuple[bytes, int]] = {}  # block and piece of each key that is written or read
        self._max_keys = MIN_KEYS
        self._filling: dict[bytes, tuple[int, set[int]]] = {}  # slot of each block, and the pieces in it

    def keys_of(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Return the keys of the states after these blocks that are on the device."""
        found = [one for one in hashes if self._states.has_snapshot(one)]
        return [key for one in found for key in self.note(one)]

    def note(self, block_hash: bytes) -> list[bytes]:
        """Return the keys of the state after a block, and remember whose they are."""
        keys = piece_keys(block_hash, self.num_pieces)
        self._wanted.update((key, (block_hash, piece)) for piece, key in enumerate(keys))
        return keys

    def find(self, key: bytes) -> int | None:
        """Return the number of a piece whose state is on the device; None for other keys."""
        block_hash, piece = self._wanted.get(key, (None, 0))
        slot = None if block_hash is None else self._states.pool.find(block_hash)
        return None if slot is None else self._number(slot, piece)

    def is_written(self, block_hash: bytes, index: DiskIndex) -> bool:
        """Return whether the state after a block, or a part of it, is on disk or about to be written."""
        (first,) = piece_keys(block_hash, 1)
        return first in self._wanted or index.find(first) is not None

    def is_stored(self, block_hash: bytes, index: DiskIndex) -> bool:
        """Return whether the disk has the whole state after a block."""
        first, *others = piece_keys(block_hash, self.num_pieces)
        return index.find(first) is not None and all(index.find(key) is not None for key in others)

    def is_piece(self, key: bytes) -> bool:
        """Return whether the key is that of a piece of a state that was written or looked for."""
        return key in self._wanted

    def place(self, key: bytes) -> int | None:
        """Return the number of a piece that was read, in a slot that is being filled; None if no slot is free.

        None for keys of blocks too.
        """
        if key not in self._wanted:
            return None
        block_hash, piece = self._wanted[key]
        pool = self._states.pool
        if block_hash not in self._filling:
            if self._states.has_snapshot(block_hash) or not pool.num_free:
                return None
            self._filling[block_hash] = pool.allocate(1)[0], set()
        slot, pieces = self._filling[block_hash]
        pieces.add(piece)
        return self._number(slot, piece)

    def end_filled(self, expects: Callable[[list[bytes]], bool]) -> None:
        """Make whole states snapshots, and release the slots of those of which no further piece is expected."""
        pool = self._states.pool
        for block_hash, (slot, pieces) in list(self._filling.items()):
            is_whole = len(pieces) == self.num_pieces
            if is_whole:
                pool.seal(slot, block_hash)
            elif expects(piece_keys(block_hash, self.num_pieces)):
                continue
            pool.free([slot])
            del self._filling[block_hash]

    def forget(self) -> None:
        """Release the slots that are being filled."""
        self._states.pool.free(slot for slot, _ in self._filling.values())
        self._filling.clear()
        self._wanted.clear()

    @property
    def num_keys(self) -> int:
        """Number of keys of which it is remembered whose they are."""
        return len(self._wanted)

    def forget_unused_keys(self, used: Callable[[], Collection[bytes]]) -> None:
        """Forget all keys but the used ones, if there are twice as many as after the last time.

        `used` returns the keys that are to be written or read.
        """
        if len(self._wanted) <= self._max_keys:
            return
        kept = used()
        self._wanted = {key: whose for key, whose in self._wanted.items() if key in kept}
        self._max_keys = max(MIN_KEYS, 2 * len(self._wanted))

    def forget_keys(self) -> None:
        """Forget which keys are whose; call it while nothing is written or read."""
        self._wanted.clear()

    def _number(self, slot: int, piece: int) -> int:
        return self._num_blocks + slot * self.num_pieces + piece
