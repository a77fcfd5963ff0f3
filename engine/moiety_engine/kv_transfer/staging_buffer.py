"""Staging buffer in host memory for KV from other engines, until its request is scheduled.

A transfer has a part from each rank of the sending engine that has shards of this rank's cache. The receiver thread
and the step loop's thread share the buffer and may call all methods.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moiety_engine.config import KvTransport
from moiety_engine.kv_transfer.cache_shards import CacheShare
from moiety_engine.kv_transfer.kv_layout import ShardViews, announced_bytes, fits, layer_bytes, views
from moiety_engine.kv_transfer.messages import Begin, CacheShard, Form, KvChunk
from moiety_engine.kv_transfer.nixl_memory import NixlFailed, NixlReads, NixlReceiver
from moiety_engine.kv_transfer.transports import open_segment
from moiety_engine.model.batch import KvCache
from moiety_engine.model.shared_cache import copy_from_first
from moiety_wire.block_hashes import MARK_BYTES, block_hash
from moiety_wire.roles import KvTransferTimes

if TYPE_CHECKING:
    from moiety_engine.distribution.collectives import RankCollectives

UNCLAIMED_S = 30.0  # KV that no request claims is dropped after this time
ANNOUNCED_S = 5.0  # longest wait for the announcement, which was sent before the request
STALLED_S = 5.0  # longest wait for the next chunk
MAX_REMEMBERED = 4096  # number of lost transfers that are remembered


class Progress(IntEnum):
    """Progress of one transfer."""

    UNKNOWN = 0  # not announced
    LOST = 1  # refused, cancelled or dropped
    COMING = 2
    THERE = 3


@dataclass(slots=True)
class _Part:
    """Part that one rank of the sending engine sends."""

    begin: Begin
    buffer_B: Tensor
    heard_s: float
    is_ending: bool = False  # all chunks are announced
    ended_unix_ns: int = 0  # time of completion; 0 while incomplete
    pieces: list[list[KvChunk]] = field(default_factory=list)  # chunks of each layer
    reads: NixlReads | None = None  # that fill the buffer with the transport nixl

    @property
    def layers(self) -> Form:
        """Layout of all layers: those with rows of every token, then those with states."""
        return (*self.begin.form, *self.begin.states)

    def next_token(self, layer: int) -> int:
        """Return the first token that the layer's next chunk must have; the number of tokens if none is missing."""
        if self.pieces[layer]:
            return self.pieces[layer][-1].end
        return 0 if layer < len(self.begin.form) else self.begin.num_tokens - 1  # a state is that of the last token

    def num_rows(self, layer: int, first: int, end: int) -> int:
        """Return the rows of a chunk of the tokens `first` to `end` - 1 of a layer; 1 for a state."""
        return len(self.begin.shards[layer].positions(first, end)) if layer < len(self.begin.form) else end - first


@dataclass(slots=True)
class _Transfer:
    begun_unix_ns: int
    num_parts: int
    parts: dict[bytes, _Part] = field(default_factory=dict)  # by the connection that began it
    is_claimed: bool = False

    @property
    def first(self) -> Begin:
        """Announcement of the first part."""
        return next(iter(self.parts.values())).begin

    @property
    def heard_s(self) -> float:
        """Time of the newest message."""
        return max(part.heard_s for part in self.parts.values())

    @property
    def ended_unix_ns(self) -> int:
        """Time of completion; 0 while incomplete."""
        ends_ns = [part.ended_unix_ns for part in self.parts.values()]
        return max(ends_ns) if len(ends_ns) == self.num_parts and all(ends_ns) else 0

    def is_stalled(self, now_s: float) -> bool:
        """Return whether a part that has begun, or one that has not, is overdue."""
        unfinished = [part.heard_s for part in self.parts.values() if not part.ended_unix_ns]
        return now_s - min(unfinished, default=self.heard_s) > STALLED_S


def prompt_hash(token_ids: Sequence[int]) -> bytes:
    """Return the hash that identifies the tokens of a transfer."""
    return block_hash(blake2b(digest_size=16, person=b"moiety-transfer").digest(), token_ids)[MARK_BYTES:]


class StagingBuffer:
    """Received KV, at most `max_bytes`."""

    def __init__(
        self,
        max_bytes: int,
        share: CacheShare,
        nixl: NixlReceiver | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the buffer of a rank that has this share of the cache. Without `nixl`, KV sent by it is refused."""
        self._share, self._nixl = share, nixl
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._transfers: dict[str, _Transfer] = {}
        self._lost: dict[str, None] = {}
        self._kv: KvCache | None = None
        self._held_bytes = 0

    def serve(self, kv: KvCache | None) -> None:
        """Set the cache that received KV is for; None refuses all transfers."""
        with self._lock:
            self._kv = kv

    # ── from the sender ──

    def begin(self, begin: Begin, sender: bytes = b"") -> str:
        """Begin a transfer, or a part of one, from a connection. Return why it is refused, or "".

        A part cannot begin twice. A part that the transfer does not have is refused, and the others continue; one that
        it has, but for which memory is short, loses the whole transfer.
        """
        share, ranks = self._share, begin.ranks
        incompatible = share.why_incompatible(ranks)  # it and the shards are computed before the step loop has to wait
        expected = () if incompatible else share.shards_from_rank(ranks, begin.rank)
        num_parts = len(share.shards_from(ranks)) if expected else 0
        self._drop_unclaimed()
        with self._lock:
            transfer = self._transfers.get(begin.transfer_id)
            parts = {} if transfer is None else transfer.parts
            if sender in parts or any(part.begin.rank == begin.rank for part in parts.values()):
                return "a transfer with this id has begun already"
            if begin.transfer_id in self._lost:
                return "a transfer with this id has ended already"
            complaint = incompatible or self._complaint(begin, expected, transfer)
            if complaint:
                if transfer is None:
                    self._remember_lost(begin.transfer_id)
                return complaint
            complaint = self._lacks_room(begin)
            self._held_bytes += begin.num_bytes
        reads = buffer_B = None
        try:  # while the step loop goes on, since registering memory takes long
            reads = None if complaint else self._open_reads(begin)
            buffer_B = None if complaint else _buffer(begin) if reads is None else reads.buffer_B
        except (OSError, ValueError, RuntimeError) as exc:  # torch raises RuntimeError if memory is short
            complaint = f"its shared memory cannot be opened ({exc}); use --kv-transport tcp, which needs none"
        except NixlFailed as exc:
            complaint = f"its memory cannot be read by NIXL ({exc}); use --kv-transport tcp"
        with self._lock:
            if not complaint and begin.transfer_id in self._lost:
                complaint = "the transfer has ended meanwhile"
            if not complaint and buffer_B is not None:
                if transfer is None:
                    transfer = self._transfers[begin.transfer_id] = _Transfer(time.time_ns(), num_parts)
                pieces: list[list[KvChunk]] = [[] for _ in (*begin.form, *begin.states)]
                transfer.parts[sender] = _Part(begin, buffer_B, self._clock(), pieces=pieces, reads=reads)
                return ""
            others = self._take(begin.transfer_id)
            self._remember_lost(begin.transfer_id)
            others.append(_Part(begin, torch.empty(0), self._clock(), reads=reads))
        self._release(others)
        return complaint

    def put(self, piece: KvChunk, frames: Sequence[memoryview], sender: bytes = b"") -> None:
        """Store a chunk; its bytes come with it with the transport tcp only. An invalid chunk ends the transfer.

        The chunks of a layer must come in order and without gaps: a token without KV would keep that of the sequence
        that had its block before.
        """
        part = self._part_of(piece.transfer_id, sender)
        if part is None or part.is_ending:
            return
        form, buffer_B = part.layers, part.buffer_B
        is_right = 0 <= piece.layer < len(form) and piece.first < piece.end <= part.begin.num_tokens
        is_right = is_right and piece.first == part.next_token(piece.layer)
        num_bytes = 0
        if is_right:
            num_bytes = part.num_rows(piece.layer, piece.first, piece.end) * layer_bytes(form[piece.layer])
        if part.begin.transport == KvTransport.TCP:
            is_right = is_right and sum(len(frame) for frame in frames) == num_bytes
        if not is_right or not 0 <= piece.offset <= len(buffer_B) - num_bytes:
            self.drop(piece.transfer_id)
            return
        begin = piece.offset
        for frame in frames:
            buffer_B[begin : begin + len(frame)].numpy()[:] = frame
            begin += len(frame)
        if part.reads is not None and not part.reads.read(piece.offset, num_bytes):
            self.drop(piece.transfer_id)
            return
        part.pieces[piece.layer].append(piece)
        part.heard_s = self._clock()

    def end(self, transfer_id: str, sender: bytes = b"") -> bool | None:
        """End a connection's part, and return whether it is complete. If not, the whole transfer is dropped.

        Returns None while the last of it is read by NIXL: call it again later.
        """
        part = self._part_of(transfer_id, sender)
        if part is None or part.ended_unix_ns:
            return part is not None
        if any(part.next_token(layer) != part.begin.num_tokens for layer in range(len(part.pieces))):
            self.drop(transfer_id)
            return False
        if not part.is_ending:
            part.is_ending, part.heard_s = True, self._clock()
        is_read = True if part.reads is None else part.reads.finish()
        if is_read is None and self._clock() - part.heard_s <= STALLED_S:
            return None
        if not is_read:
            self.drop(transfer_id)
            return False
        part.heard_s, part.ended_unix_ns = self._clock(), time.time_ns()
        return True

    def cancel(self, transfer_id: str, sender: bytes = b"") -> None:
        """Drop a transfer at the request of a connection that began a part of it.

        A complete transfer stays: its request may count on it. One that no request claims is dropped later.
        """
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or sender not in transfer.parts or transfer.ended_unix_ns:
                return
            parts = self._take(transfer_id)
        self._release(parts)

    def drop(self, transfer_id: str) -> None:
        """Drop a transfer that is not needed any more. An unknown transfer is ignored."""
        with self._lock:
            parts = self._take(transfer_id)
        self._release(parts)

    # ── from the step loop ──

    def claim(self, transfer_id: str) -> Progress:
        """Return the progress of a transfer whose request has arrived. From then on the request must drop it."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None:
                return Progress.LOST if transfer_id in self._lost else Progress.UNKNOWN
            transfer.is_claimed = True
            if transfer.ended_unix_ns:
                return Progress.THERE
            if not transfer.is_stalled(self._clock()):
                return Progress.COMING
            parts = self._take(transfer_id)
        self._release(parts)
        return Progress.LOST

    def arrival(self, transfer_id: str, hashed: bytes) -> KvTransferTimes | None:
        """Return the transfer times of complete KV.

        KV that is incomplete or of another prompt is dropped, and returns None.
        """
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None and transfer.ended_unix_ns and transfer.first.prompt_hash == hashed:
                first, num_bytes = transfer.first, sum(part.begin.num_bytes for part in transfer.parts.values())
                ended_ns = transfer.ended_unix_ns
                return KvTransferTimes(transfer.begun_unix_ns, ended_ns, first.num_tokens, num_bytes, first.transport)
            parts = self._take(transfer_id)
        self._release(parts)
        return None

    @torch.inference_mode()
    def load(
        self,
        transfer_id: str,
        first: int,
        tables: Sequence[Sequence[int]],
        firsts: Sequence[int],
        state_slot: int = -1,
    ) -> None:
        """Copy tokens `first` and later into the cache, and free the memory.

        `tables` are the sequence's block tables; tokens before their blocks `firsts` are behind a window. `state_slot`:
        slot for its recurrent state; -1 for a model without recurrent layers.
        On a GPU, work queued afterwards sees the tokens.
        """
        with self._lock:
            transfer, kv = self._transfers.get(transfer_id), self._kv
        assert transfer is not None, "KV is loaded that has not arrived"  # only the request drops what has
        assert kv is not None, "KV is loaded without a cache"
        blocks_of = [torch.tensor(table) for table in tables]
        for part in transfer.parts.values():
            self._load(part, kv, first, blocks_of, firsts, state_slot)
        self.drop(transfer_id)

    @torch.inference_mode()
    def share_loaded(
        self, copies: RankCollectives, first: int, tables: Sequence[Sequence[int]], firsts: Sequence[int]
    ) -> None:
        """Copy what the first rank of `copies` has loaded into the caches of the others.

        The arguments are those of `load`; all ranks must call it together. Places of the last block that hold no token
        yet are copied too. Nothing is done if no rank has a copy.
        """
        if copies.size == 1:
            return
        with self._lock:
            kv = self._kv
        assert kv is not None, "KV is loaded without a cache"
        size, slots_of = kv.block_size, []
        for table, first_block in zip(tables, firsts, strict=True):
            position_T = torch.arange(max(first, first_block * size), len(table) * size)
            slots_of.append(torch.tensor(table)[position_T // size] * size + position_T % size)
        for number, cache in kv.token_caches.items():
            copy_from_first(copies, cache, slots_of[kv.groups[number]])

    def _load(
        self,
        part: _Part,
        kv: KvCache,
        first: int,
        blocks_of: Sequence[Tensor],
        firsts: Sequence[int],
        state_slot: int,
    ) -> None:
        shards = ShardViews(kv, self._share, part.begin.shards)
        num_paged = len(shards.paged)
        of_layers = zip(shards.shards, shards.numbers, part.begin.form, part.pieces, strict=False)
        for index, (shard, number, form, pieces) in enumerate(of_layers):
            group = kv.groups[number]
            kept_from = max(first, firsts[group] * kv.block_size)
            for piece in pieces:
                sent = shard.positions(piece.first, piece.end)
                kept = shard.positions(max(kept_from, piece.first), piece.end)
                if not kept:
                    continue
                rows = views(part.buffer_B[piece.offset :], form, len(sent))
                kept_rows = [row[len(sent) - len(kept) :] for row in rows]
                shards.write_rows(index, kept_rows, blocks_of[group], kept)
        for index, (form, (piece,)) in enumerate(zip(part.begin.states, part.pieces[num_paged:], strict=True)):
            values = views(part.buffer_B[piece.offset :], form, 1)
            shards.write_state(index, state_slot, [value[0] for value in values])

    def _part_of(self, transfer_id: str, sender: bytes) -> _Part | None:
        transfer = self._transfers.get(transfer_id)
        return None if transfer is None else transfer.parts.get(sender)

    def _drop_unclaimed(self) -> None:
        now_s, parts = self._clock(), list[_Part]()
        with self._lock:
            for transfer_id, transfer in list(self._transfers.items()):
                if not transfer.is_claimed and now_s - transfer.heard_s > UNCLAIMED_S:
                    parts += self._take(transfer_id)
        self._release(parts)

    def _take(self, transfer_id: str) -> list[_Part]:
        """Remove a transfer, and return its parts, which the caller releases without the lock. It holds the lock."""
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is None:
            return []
        self._remember_lost(transfer_id)
        return list(transfer.parts.values())

    def _release(self, parts: Sequence[_Part]) -> None:
        """Free the memory of parts. The other thread goes on meanwhile, since deregistering memory takes long."""
        for part in parts:
            if part.reads is not None:
                part.reads.close()
        if parts:
            with self._lock:
                self._held_bytes -= sum(part.begin.num_bytes for part in parts)

    def _open_reads(self, begin: Begin) -> NixlReads | None:
        if begin.memory is None or self._nixl is None:
            return None
        return self._nixl.open(begin.memory, begin.num_bytes)

    def _remember_lost(self, transfer_id: str) -> None:
        self._lost[transfer_id] = None
        if len(self._lost) > MAX_REMEMBERED:
            del self._lost[next(iter(self._lost))]

    def _complaint(self, begin: Begin, expected: Sequence[CacheShard], transfer: _Transfer | None) -> str:
        """Return why what is announced is no part of a transfer to this cache; "" if it is.

        `expected`: the shards of its rank; `transfer` has the parts that have begun before.
        """
        if self._kv is None:
            return "the engine sleeps"
        if begin.transport != begin.announced_transport:
            return f"its transport {begin.transport[:64]!r} is unknown: run the same release of both engines"
        if begin.memory is not None and self._nixl is None:
            return "it is sent by NIXL: start this engine with --kv-transport nixl as well"
        return self._why_unlike(begin, expected, self._kv) or (
            "" if transfer is None else begin.why_apart(transfer.first)
        )

    def _why_unlike(self, begin: Begin, expected: Sequence[CacheShard], kv: KvCache) -> str:
        """Return why what is announced is not of this cache; "" if it is."""
        try:
            is_fit = begin.shards == expected != () and fits(
                begin.form, begin.states, ShardViews(kv, self._share, expected)
            )
            num_bytes = announced_bytes(begin) if is_fit else 0
        except (ValueError, IndexError) as exc:
            return f"its layout cannot be read: {exc}"
        if not is_fit:
            return "it is from a model with other layers, heads or widths, or only one engine has --speculate mtp"
        if begin.rotation != kv.rotation:
            return "its keys have other rotary embeddings: give both engines the same --max-context-tokens"
        if begin.windows != kv.windows:  # else freed blocks would be read, and cached as if they were valid
            return (
                f"its block tables free what is behind the windows {begin.windows}, and not {kv.windows}: give both "
                "engines the same --disk-cache, --batching and --speculate"
            )
        if begin.num_tokens < 1 or begin.num_bytes != num_bytes:
            return f"{begin.num_tokens} tokens have {num_bytes} bytes, not {begin.num_bytes}"
        return ""

    def _lacks_room(self, begin: Begin) -> str:
        if self._held_bytes + begin.num_bytes > self._max_bytes:
            return (
                f"{begin.num_bytes} bytes do not fit into the buffer of {self._max_bytes} bytes, of which "
                f"{self._held_bytes} are used: raise --kv-buffer-bytes"
            )
        return ""


def _buffer(begin: Begin) -> Tensor:
    if begin.segment:
        return open_segment(begin.segment, begin.num_bytes)
    return torch.empty(begin.num_bytes, dtype=torch.uint8)
