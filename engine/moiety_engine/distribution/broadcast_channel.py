"""Channel for bytes from rank 0 to all other ranks, in order, broadcast over the CPU network."""

from __future__ import annotations

import struct

import torch
import torch.distributed as dist

_LENGTH = struct.Struct("!Q")
HEAD_BYTES = 4096  # a message that fits takes one broadcast, as most decode steps do


class Channel:
    """One end of the channel. All ranks create it from the same group."""

    def __init__(self, handle: dist.ProcessGroup) -> None:
        self._handle = handle
        self._head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)

    def send(self, message: bytes) -> None:
        """Send a message. Only on rank 0; returns when the bytes are queued."""
        framed = bytearray(_LENGTH.pack(len(message)) + message)
        first = framed[:HEAD_BYTES]
        self._head[: len(first)] = torch.frombuffer(first, dtype=torch.uint8)
        dist.broadcast(self._head, group=self._handle, group_src=0)
        if len(framed) > HEAD_BYTES:
            rest = torch.frombuffer(framed, dtype=torch.uint8)[HEAD_BYTES:]
            dist.broadcast(rest, group=self._handle, group_src=0)

    def receive(self) -> bytes:
        """Wait for the next message and return it. Only on the other ranks."""
        dist.broadcast(self._head, group=self._handle, group_src=0)
        head = self._head.numpy().tobytes()
        end = _LENGTH.size + _LENGTH.unpack_from(head)[0]
        if end <= HEAD_BYTES:
            return head[_LENGTH.size : end]
        rest = torch.empty(end - HEAD_BYTES, dtype=torch.uint8)
        dist.broadcast(rest, group=self._handle, group_src=0)
        return head[_LENGTH.size :] + rest.numpy().tobytes()
