"""Reads a ZeroMQ socket from an event loop without a task or a future a message.

ZeroMQ's file descriptor is edge-triggered and tells only that something may have changed: after it fires, and after
every send, one must read until nothing is left. That is kept here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

MESSAGES_A_TURN = 256


class ZmqReader:
    """Gives every message of `socket` to `on_frames`, with the user id that ZAP gave to its connection ("" where there
    is none), and calls `on_turn_end` after each batch. Does not own the socket, but stops reading on close()."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_frames: Callable[[list[bytes], str], None],
        on_turn_end: Callable[[], None],
        *,
        has_users: bool = False,
    ) -> None:
        self._socket = socket
        self._receive = _receive_with_user if has_users else _receive
        self._on_frames = on_frames
        self._on_turn_end = on_turn_end
        self._loop = asyncio.get_running_loop()
        self._is_due = False
        self._is_closed = False
        self._loop.add_reader(socket.fileno(), self.read)
        self.read_soon()

    def read_soon(self) -> None:
        """To be called after a send on the socket, which may have swallowed the edge."""
        if not self._is_due and not self._is_closed:
            self._is_due = True
            self._loop.call_soon(self.read)

    def read(self) -> None:
        """Read what is there."""
        self._is_due = False
        num_read = 0
        while not self._is_closed and num_read < MESSAGES_A_TURN:
            try:
                frames, user = self._receive(self._socket)
            except zmq.Again:
                break
            num_read += 1
            self._on_frames(frames, user)
        if num_read:
            self._on_turn_end()
        if num_read == MESSAGES_A_TURN:
            self.read_soon()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._socket.fileno())


def _receive(socket: zmq.Socket[bytes]) -> tuple[list[bytes], str]:
    return socket.recv_multipart(zmq.NOBLOCK), ""


def _receive_with_user(socket: zmq.Socket[bytes]) -> tuple[list[bytes], str]:
    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    return [frame.bytes for frame in frames], str(frames[-1].get("User-Id"))
