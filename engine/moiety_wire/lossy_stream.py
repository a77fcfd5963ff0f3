"""Standard error of a process whose log must not fail: a full disk costs lines of the log, and no request."""

from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime
from typing import TextIO


class LossyStream:
    """Writer of whole lines to a text stream; a write that fails loses its text, which is counted.

    The first write that succeeds again is preceded by one line of JSON with the event `log_output_lost`. A stream with
    a descriptor is written without its buffer, which would keep the text of a failed write and raise again at exit.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost_bytes = 0  # since the last write that succeeded
        self._reason = ""
        self._lock = threading.Lock()
        self.total_lost_bytes = 0
        try:
            self._fd: int | None = stream.fileno()
        except (OSError, AttributeError):  # a stream in memory
            self._fd = None

    def write(self, text: str) -> int:
        """Write the text, or count it as lost. Return its length in characters."""
        block = text.encode("utf-8", errors="backslashreplace")
        with self._lock:
            self._write_or_lose(block)
        return len(text)

    def _write_or_lose(self, block: bytes) -> None:
        try:
            self._write_all((self._describe_loss() if self._lost_bytes else b"") + block)
        except OSError as exc:
            self._reason = exc.strerror or type(exc).__name__
            self._lost_bytes += len(block)
            self.total_lost_bytes += len(block)
        else:
            self._lost_bytes = 0

    def flush(self) -> None:
        """Do nothing: `write` leaves nothing behind."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def _write_all(self, block: bytes) -> None:
        if self._fd is None:
            self._stream.write(block.decode("utf-8"))
            self._stream.flush()
            return
        while block:
            block = block[os.write(self._fd, block) :]

    def _describe_loss(self) -> bytes:
        """Return the line that says how much is missing, after the end of a line that was written in part."""
        event = {
            "event": "log_output_lost",
            "bytes": self._lost_bytes,
            "reason": self._reason,
            "level": "warning",
            "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        }
        return b"\n" + json.dumps(event).encode() + b"\n"
