"""Channels for bytes from rank 0 to all other ranks, in order, over the CPU network."""

from __future__ import annotations

import struct
from collections import deque
from typing import Protocol

import torch
import torch.distributed as dist

_LENGTH = struct.Struct("!Q")
HEAD_BYTES = 4096  # a message that fits takes one broadcast, as most decode steps do
_TAG = 1  # rows of steps have tag 0
_MOST_PENDING = 64  # messages that may be under way


class ControlChannel(Protocol):
    """One end of a channel. All ranks create the same kind from the same group."""

    def send(self, message: bytes) -> None:
        """Send a message. Only on rank 0."""
        ...

    def receive(self) -> bytes:
        """Wait for the next message and return it. Only on the other ranks."""
        ...

    def flush(self) -> None:
        """Wait until the other ranks have received all messages."""
        ...

    def replace_group(self, handle: dist.ProcessGroup) -> None:
        """Use another group from now on. All of its ranks must call this after the same message."""
        ...


class Channel:
    """One end of a channel by broadcasts, which wait until the other ranks take part."""

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

    def replace_group(self, handle: dist.ProcessGroup) -> None:
        """Use another group from now on. All of its ranks must call this after the same message."""
        self._handle = handle

    def flush(self) -> None:
        """Return at once: the other ranks have taken part in all broadcasts."""


class DirectChannel:
    """One end of a channel by messages to each rank, which do not wait for the receivers.

    A rank that still computes a step delays neither rank 0 nor other ranks.
    """

    def __init__(self, handle: dist.ProcessGroup) -> None:
        self._handle = handle
        self._receivers = range(1, handle.size())
        self._sent: deque[tuple[list[dist.Work], torch.Tensor]] = deque()  # tensors are kept until they are sent

    def send(self, message: bytes) -> None:
        """Send a message. Only on rank 0; returns at once unless many earlier messages have not been received."""
        framed = bytearray(_LENGTH.pack(len(message)) + message)
        framed.extend(bytes(max(0, HEAD_BYTES - len(framed))))
        whole = torch.frombuffer(framed, dtype=torch.uint8)
        works = []
        for rank in self._receivers:
            works.append(self._begin_send(whole[:HEAD_BYTES], rank))
            if len(whole) > HEAD_BYTES:
                works.append(self._begin_send(whole[HEAD_BYTES:], rank))
        self._sent.append((works, whole))
        self._wait_for_all_but(_MOST_PENDING)

    def flush(self) -> None:
        """Wait until the other ranks have received all messages."""
        self._wait_for_all_but(0)

    def replace_group(self, handle: dist.ProcessGroup) -> None:
        """Use another group from now on; all messages must have been received."""
        self._handle, self._receivers = handle, range(1, handle.size())

    def receive(self) -> bytes:
        """Wait for the next message and return it. Only on the other ranks."""
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        dist.recv(head, group=self._handle, group_src=0, tag=_TAG)
        first = head.numpy().tobytes()
        end = _LENGTH.size + _LENGTH.unpack_from(first)[0]
        if end <= HEAD_BYTES:
            return first[_LENGTH.size : end]
        rest = torch.empty(end - HEAD_BYTES, dtype=torch.uint8)
        dist.recv(rest, group=self._handle, group_src=0, tag=_TAG)
        return first[_LENGTH.size :] + rest.numpy().tobytes()

    def _wait_for_all_but(self, num_newest: int) -> None:
        while len(self._sent) > num_newest:
            for work in self._sent.popleft()[0]:
                work.wait()

    def _begin_send(self, part: torch.Tensor, rank: int) -> dist.Work:
        work = dist.isend(part, group=self._handle, group_dst=rank, tag=_TAG)
        assert work is not None, "this rank is none of the group"
        return work
