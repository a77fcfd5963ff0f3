"""Reader of a ZeroMQ socket in an event loop, without a task or a future per message.

ZeroMQ's file descriptor is edge-triggered and only signals that the state may have changed: after each signal, and
after every send, the socket must be read until it is empty. This module ensures that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

MESSAGES_A_TURN = 256


class ZmqReader:
    """Passes every message of `socket` to `on_frames`, and calls `on_turn_end` after each batch.

    `on_frames` also gets the user id that ZAP assigned to the connection, or "". The reader does not own the socket; it
    stops reading at `close`.
    """

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
        """Schedule a read. Call it after a send on the socket, which may have consumed the edge."""
        if not self._is_due and not self._is_closed:
            self._is_due = True
            self._loop.call_soon(self.read)

    def read(self) -> None:
        """Read the messages that are queued."""
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
