"""Writer on a thread of its own: a full, slow or paused destination never stops the process that writes to it."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable

MAX_WAITING_BYTES = 4 * 1024 * 1024


class BackgroundWriter:
    """Queue of blocks that a thread hands to `write`. Blocks that fail, or that find the queue full, are lost.

    Both callbacks are called on the thread: `on_lost` for each loss, with its bytes and its reason, and `on_written`
    for the first block that is written after losses, with the bytes that were lost before it.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[bytes], None],
        on_lost: Callable[[int, OSError], None],
        on_written: Callable[[int], None],
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """`write` raises OSError for a block that it cannot write."""
        self._write = write
        self._on_lost = on_lost
        self._on_written = on_written
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._is_writing = False
        self._num_overflowed = 0  # bytes that found the queue full, not yet reported
        self._num_lost = 0  # since the last block that was written
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, block: bytes) -> None:
        """Queue a block. Returns at once; never raises. An empty block reaches `write`, too."""
        with self._changed:
            if self._is_closed:
                return
            if self._num_waiting_bytes + len(block) > self._max_waiting_bytes:
                self._num_overflowed += len(block)
                return
            self._waiting.append(block)
            self._num_waiting_bytes += len(block)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queue is written; return False if that takes longer than the timeout."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while self._waiting or self._is_writing:
                left_s = end - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return False
        return True

    def close(self, timeout_s: float) -> None:
        """Write the queue within the timeout, and end the thread. Idempotent."""
        self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                while not self._waiting:
                    if self._is_closed:
                        return
                    self._changed.wait()
                block = self._waiting.popleft()
                self._num_waiting_bytes -= len(block)
                self._is_writing = True
                overflowed, self._num_overflowed = self._num_overflowed, 0
            self._write_block(block, overflowed)

    def _write_block(self, block: bytes, num_overflowed: int) -> None:
        if num_overflowed:
            self._lose(num_overflowed, OSError(errno.EAGAIN, "it is written too slowly"))
        try:
            self._write(block)
        except OSError as exc:
            self._lose(len(block), exc)
            return
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            self._on_written(lost)

    def _lose(self, num_bytes: int, reason: OSError) -> None:
        self._num_lost += num_bytes
        self._on_lost(num_bytes, reason)
