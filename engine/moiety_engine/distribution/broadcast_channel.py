"""What rank 0 says to all other ranks, in order: bytes, broadcast over the processors' network."""

from __future__ import annotations

import struct

import torch
import torch.distributed as dist

_LENGTH = struct.Struct("!Q")
HEAD_BYTES = 4096  # one broadcast where a message fits in it, which one of a decode step mostly does


class Channel:
    """One end of it. All ranks make it of the same group."""

    def __init__(self, handle: dist.ProcessGroup) -> None:
        self._handle = handle
        self._head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)

    def send(self, message: bytes) -> None:
        """On rank 0; returns when the bytes are on their way."""
        framed = bytearray(_LENGTH.pack(len(message)) + message)
        first = framed[:HEAD_BYTES]
        self._head[: len(first)] = torch.frombuffer(first, dtype=torch.uint8)
        dist.broadcast(self._head, group=self._handle, group_src=0)
        if len(framed) > HEAD_BYTES:
            rest = torch.frombuffer(framed, dtype=torch.uint8)[HEAD_BYTES:]
            dist.broadcast(rest, group=self._handle, group_src=0)

    def receive(self) -> bytes:
        """On the others; waits for the next message."""
        dist.broadcast(self._head, group=self._handle, group_src=0)
        head = self._head.numpy().tobytes()
        end = _LENGTH.size + _LENGTH.unpack_from(head)[0]
        if end <= HEAD_BYTES:
            return head[_LENGTH.size : end]
        rest = torch.empty(end - HEAD_BYTES, dtype=torch.uint8)
        dist.broadcast(rest, group=self._handle, group_src=0)
        return head[_LENGTH.size :] + rest.numpy().tobytes()
