"""Frames between a process and those that it has started: msgpack over Unix sockets, with file descriptors.

The owner requests a fork from the template process by an empty frame with two file descriptors: the child's socket, and
a socket on which the template reports the child's end.
"""

from __future__ import annotations

import math
import socket
import time
from typing import TypeVar

import msgspec

EXIT_CRASHED = 70  # of a child, after an unexpected exception
EXIT_OUT_OF_MEMORY = 71  # Python could not allocate; native code aborts
MAX_FDS = 4
MAX_FRAME_BYTES = 1 << 30
_HEADER_BYTES = 4
_Message = TypeVar("_Message")


class FrameTooLong(OSError):
    """The peer announces a frame that is longer than its receiver allows."""


class ChildExit(msgspec.Struct, frozen=True, array_like=True):
    """Exit of a child: its wait status, and the processor time that it used, in seconds."""

    status: int
    cpu_s: float


def send_frame(link: socket.socket, message: object, fds: tuple[int, ...] = ()) -> None:
    """Send one frame, with file descriptors on its first byte. Raises OSError."""
    payload = msgspec.msgpack.encode(message)
    frame = len(payload).to_bytes(_HEADER_BYTES, "little") + payload
    sent = socket.send_fds(link, [frame], fds) if fds else link.send(frame)
    if sent < len(frame):
        link.sendall(frame[sent:])


def receive_frame(
    link: socket.socket, kind: type[_Message], *, deadline_s: float = math.inf, max_bytes: int = MAX_FRAME_BYTES
) -> _Message:
    """Receive one frame, which has at most `max_bytes` of content.

    `deadline_s`: on the clock of `time.monotonic`, for the whole frame, however slowly it comes; without it the timeout
    of the link applies to each part of the frame. Raises EOFError where the peer is gone, OSError (including
    TimeoutError and FrameTooLong) and msgspec.MsgspecError.
    """
    timeout_s = link.gettimeout()
    try:
        return _receive_rest(link, b"", kind, deadline_s, max_bytes)
    finally:
        link.settimeout(timeout_s)


def receive_frame_with_fds(link: socket.socket, kind: type[_Message]) -> tuple[_Message, list[int]]:
    """Receive one frame and the descriptors that came with it, which the caller closes."""
    begun, fds, _, _ = socket.recv_fds(link, _HEADER_BYTES, MAX_FDS)
    return _receive_rest(link, begun, kind, math.inf, MAX_FRAME_BYTES), fds


def _receive_rest(
    link: socket.socket, begun: bytes, kind: type[_Message], deadline_s: float, max_bytes: int
) -> _Message:
    header = _receive_exactly(link, _HEADER_BYTES, begun, deadline_s)
    num_bytes = int.from_bytes(header, "little")
    if num_bytes > max_bytes:
        raise FrameTooLong(f"a frame of {num_bytes:,} bytes is too long: {max_bytes:,} are allowed")
    return msgspec.msgpack.decode(_receive_exactly(link, num_bytes, b"", deadline_s), type=kind)


def _receive_exactly(link: socket.socket, num_bytes: int, begun: bytes, deadline_s: float) -> bytearray:
    received = bytearray(num_bytes)
    received[: len(begun)] = begun
    rest = memoryview(received)[len(begun) :]
    while rest:
        if deadline_s < math.inf:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("a frame was not complete at its deadline")
            link.settimeout(left_s)
        count = link.recv_into(rest)
        if not count:
            raise EOFError("the other process has ended")
        rest = rest[count:]
    return received
