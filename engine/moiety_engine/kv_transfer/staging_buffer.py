"""Staging buffer in host memory for KV from other engines, until its request is scheduled.

The receiver thread and the step loop's thread share it and may call all methods.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b

import torch
from torch import Tensor

from moiety_engine.cache.block_hashes import MARK_BYTES, block_hash
from moiety_engine.kv_transfer.kv_layout import fits, layer_bytes, token_bytes, views, write, write_state
from moiety_engine.kv_transfer.messages import Begin, Form, KvChunk
from moiety_engine.kv_transfer.transports import open_segment
from moiety_engine.model.batch import KvCache
from moiety_wire.roles import KvTransferTimes

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
class _Transfer:
    begin: Begin
    buffer_B: Tensor
    begun_unix_ns: int
    heard_s: float
    sender: bytes  # connection that began the transfer
    is_claimed: bool = False
    ended_unix_ns: int = 0  # time of completion; 0 while incomplete
    pieces: list[list[KvChunk]] = field(default_factory=list)  # chunks of each layer

    @property
    def layers(self) -> Form:
        """Layout of all layers: those with rows of every token, then those with states."""
        return (*self.begin.form, *self.begin.states)


def prompt_hash(token_ids: Sequence[int]) -> bytes:
    """Return the hash that identifies the tokens of a transfer."""
    return block_hash(blake2b(digest_size=16, person=b"moiety-transfer").digest(), token_ids)[MARK_BYTES:]


class StagingBuffer:
    """Received KV, at most `max_bytes`."""

    def __init__(self, max_bytes: int, *, part: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """Create the buffer of a rank whose part of the KV is named `part`."""
        self._part = part
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
        """Begin a transfer from a connection. Return why it is refused, or "". A transfer cannot begin twice."""
        with self._lock:
            self._drop_unclaimed()
            if begin.transfer_id in self._transfers:
                return "a transfer with this id has begun already"
            if begin.transfer_id in self._lost:
                return "a transfer with this id has ended already"
            complaint = self._complaint(begin)
            if not complaint:
                try:
                    buffer_B = _buffer(begin)
                except (OSError, ValueError, RuntimeError) as exc:  # torch raises RuntimeError if memory is short
                    complaint = f"its shared memory cannot be opened ({exc}); use --kv-transport tcp, which needs none"
            if complaint:
                self._remember_lost(begin.transfer_id)
                return complaint
            pieces: list[list[KvChunk]] = [[] for _ in (*begin.form, *begin.states)]
            self._held_bytes += begin.num_bytes
            begun_ns, now_s = time.time_ns(), self._clock()
            self._transfers[begin.transfer_id] = _Transfer(begin, buffer_B, begun_ns, now_s, sender, pieces=pieces)
            return ""

    def put(self, piece: KvChunk, frames: Sequence[memoryview], sender: bytes = b"") -> None:
        """Store a chunk; its bytes come with it unless the memory is shared. An invalid chunk ends the transfer."""
        transfer = self._transfers.get(piece.transfer_id)
        if transfer is None or transfer.sender != sender or transfer.ended_unix_ns:
            return
        form, buffer_B = transfer.layers, transfer.buffer_B
        is_right = 0 <= piece.layer < len(form) and 0 <= piece.first < piece.end <= transfer.begin.num_tokens
        num_bytes = (piece.end - piece.first) * layer_bytes(form[piece.layer]) if is_right else 0
        if not transfer.begin.segment:
            is_right = is_right and sum(len(frame) for frame in frames) == num_bytes
        if not is_right or not 0 <= piece.offset <= len(buffer_B) - num_bytes:
            self.drop(piece.transfer_id)
            return
        begin = piece.offset
        for frame in frames:
            buffer_B[begin : begin + len(frame)].numpy()[:] = frame
            begin += len(frame)
        transfer.pieces[piece.layer].append(piece)
        transfer.heard_s = self._clock()

    def end(self, transfer_id: str, sender: bytes = b"") -> bool:
        """End a transfer, and return whether it is complete. An incomplete transfer is dropped."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.sender != sender:
            return False
        begin = transfer.begin
        expected = [begin.num_tokens] * len(begin.form) + [1] * len(begin.states)
        if [sum(piece.end - piece.first for piece in layer) for layer in transfer.pieces] != expected:
            self.drop(transfer_id)
            return False
        transfer.ended_unix_ns, transfer.heard_s = time.time_ns(), self._clock()
        return True

    def cancel(self, transfer_id: str, sender: bytes = b"") -> None:
        """Drop a transfer at the request of the connection that began it."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None and transfer.sender == sender:
                self._drop(transfer_id)

    def drop(self, transfer_id: str) -> None:
        """Drop a transfer that is not needed any more. An unknown transfer is ignored."""
        with self._lock:
            self._drop(transfer_id)

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
            if self._clock() - transfer.heard_s > STALLED_S:
                self._drop(transfer_id)
                return Progress.LOST
            return Progress.COMING

    def arrival(self, transfer_id: str, hashed: bytes) -> KvTransferTimes | None:
        """Return the transfer times of complete KV.

        KV that is incomplete or of another prompt is dropped, and returns None.
        """
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or not transfer.ended_unix_ns or transfer.begin.prompt_hash != hashed:
                self._drop(transfer_id)
                return None
            begin = transfer.begin
            ended_ns = transfer.ended_unix_ns
            return KvTransferTimes(transfer.begun_unix_ns, ended_ns, begin.num_tokens, begin.num_bytes, begin.transport)

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
            transfer, kv = self._transfers[transfer_id], self._kv
        assert kv is not None, "KV is loaded without a cache"
        device = kv.layers[0].parts[0].device
        blocks_of = [torch.tensor(table) for table in tables]
        token_caches, num_paged = kv.token_caches, len(transfer.begin.form)
        of_layers = zip(token_caches.items(), transfer.begin.form, transfer.pieces[:num_paged], strict=True)
        for (number, cache), form, pieces in of_layers:
            group = kv.groups[number]
            blocks_n, kept_from = blocks_of[group], max(first, firsts[group] * kv.block_size)
            for piece in pieces:
                begin = max(kept_from, piece.first)
                if begin >= piece.end:
                    continue
                rows = views(transfer.buffer_B[piece.offset :], form, piece.end - piece.first)
                positions_T = torch.arange(begin, piece.end)
                slots_T = blocks_n[positions_T // kv.block_size] * kv.block_size + positions_T % kv.block_size
                write(cache, [part[begin - piece.first :].to(device) for part in rows], slots_T.to(device))
        states = zip(kv.state_caches.values(), transfer.begin.states, transfer.pieces[num_paged:], strict=True)
        for state_cache, form, (piece,) in states:
            values = views(transfer.buffer_B[piece.offset :], form, 1)
            write_state(state_cache, state_slot, [part[0] for part in values])
        self.drop(transfer_id)

    def _drop_unclaimed(self) -> None:
        now_s = self._clock()
        for transfer_id, transfer in list(self._transfers.items()):
            if not transfer.is_claimed and now_s - transfer.heard_s > UNCLAIMED_S:
                self._drop(transfer_id)

    def _drop(self, transfer_id: str) -> None:
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is not None:
            self._held_bytes -= transfer.begin.num_bytes
            self._remember_lost(transfer_id)

    def _remember_lost(self, transfer_id: str) -> None:
        self._lost[transfer_id] = None
        if len(self._lost) > MAX_REMEMBERED:
            del self._lost[next(iter(self._lost))]

    def _complaint(self, begin: Begin) -> str:
        if self._kv is None:
            return "the engine sleeps"
        try:
            is_fit = fits(begin.form, begin.states, self._kv)
            num_bytes = begin.num_tokens * token_bytes(begin.form) + token_bytes(begin.states)
        except (ValueError, IndexError) as exc:
            return f"its layout cannot be read: {exc}"
        if begin.part != self._part:
            return f"it is the part {begin.part!r}, and not {self._part!r}: give both engines the same --tp and --pp"
        if not is_fit or (begin.rotation, begin.windows) != (self._kv.rotation, self._kv.windows):
            angles = "its keys have other rotary embeddings: give both engines the same --max-context-tokens"
            other = "it is from a model with other layers, heads or widths, or only one engine has --speculate mtp"
            windows = (  # else freed blocks would be read, and cached as if they were valid
                f"its block tables free what is behind the windows {begin.windows}, and not {self._kv.windows}: give "
                "both engines the same --disk-cache, --batching and --speculate"
            )
            return other if not is_fit else angles if begin.rotation != self._kv.rotation else windows
        if begin.num_tokens < 1 or begin.num_bytes != num_bytes:
            return f"{begin.num_tokens} tokens have {num_bytes} bytes, not {begin.num_bytes}"
        return self._lacks_room(begin)

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
