"""Transports for KV between engines: shared memory, a TCP connection, or NIXL (`nixl_memory.py`).

All fill one buffer at the receiver, chunk by chunk; they differ in which engine writes there.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moiety_engine.config import KvTransport
from moiety_engine.kv_transfer.messages import RemoteMemory

_NAME = "moiety-kv"
_SEGMENT = re.compile(r"/proc/\d+/fd/\d+")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PIDS = Path("/proc/self/ns/pid")


def own_host() -> str:
    """Return an id of this host; processes with equal ids can share memory. "" if sharing is not possible.

    Processes with equal ids see each other's files under /proc: they have the same boot, PID namespace and user.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()}-{_PIDS.readlink()}-{os.getuid()}"
    except OSError:
        return ""


class Transport(Protocol):
    """Sender's end of one transfer."""

    @property
    def name(self) -> KvTransport: ...

    @property
    def segment(self) -> str:
        """File that the receiver opens; "" if there is none."""
        ...

    @property
    def memory(self) -> RemoteMemory | None:
        """Memory that the receiver reads from by NIXL; None with other transports."""
        ...

    def put(self, offset: int, parts: Sequence[Tensor]) -> list[memoryview]:
        """Write a chunk's bytes at an offset of the receiver's buffer, or return the frames to send with it."""
        ...

    def close(self) -> None:
        """Release the resources after the transfer has ended."""
        ...


class TcpTransport:
    """Transport that sends the bytes with the messages."""

    name = KvTransport.TCP
    segment = ""
    memory = None

    def put(self, offset: int, parts: Sequence[Tensor]) -> list[memoryview]:
        return [_bytes_of(part) for part in parts]

    def close(self) -> None:
        """Do nothing, since there are no resources to release."""


class SharedMemoryTransport:
    """Transport through memory that the receiver opens as well.

    The memory has no name in the file system: it exists as long as one of the two processes has it open, so nothing
    remains when both are killed.
    """

    name = KvTransport.MEMORY
    memory = None

    def __init__(self, num_bytes: int) -> None:
        """Allocate the memory. Raises OSError if that fails."""
        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        size = max(1, num_bytes)  # a rank without a position of a short prompt sends nothing
        os.ftruncate(self._descriptor, size)
        self._memory = mmap.mmap(self._descriptor, size)

    @property
    def segment(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def put(self, offset: int, parts: Sequence[Tensor]) -> list[memoryview]:
        write_parts(torch.frombuffer(self._memory, dtype=torch.uint8), offset, parts)
        return []

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._memory.close()


def write_parts(memory_B: Tensor, offset: int, parts: Sequence[Tensor]) -> None:
    """Write the bytes of a chunk's parts to the memory, one after the other."""
    for part in parts:
        data = _bytes_of(part)
        if not data:  # no row of these tokens is this rank's, or none has its last token among them
            continue
        memory_B[offset : offset + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))
        offset += len(data)


def open_segment(segment: str, num_bytes: int) -> Tensor:
    """Map the memory that another process allocated for a transfer.

    The memory cannot be made smaller afterwards: reading what is missing would end this process. Raises OSError or
    ValueError if it cannot be opened.
    """
    if not (_SEGMENT.fullmatch(segment) and str(Path(segment).readlink()).startswith(f"/memfd:{_NAME}")):
        raise ValueError(f"{segment[:64]!r} is not a shared memory segment for KV")
    descriptor = os.open(segment, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        if os.fstat(descriptor).st_size < num_bytes:
            raise ValueError(f"{segment} has fewer than {num_bytes} bytes")
        memory = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_WRITE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _bytes_of(part: Tensor) -> memoryview:
    values: np.ndarray = part.reshape(-1).view(torch.uint8).numpy()
    return values.data
