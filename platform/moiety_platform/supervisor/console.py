"""Console output of `moiety serve`: whole lines, from the supervisor and from its parts."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from moiety_platform.supervisor.background_writer import BackgroundWriter

COLOURS = {"engine": "36", "gateway": "32", "dashboard": "35", "moiety": "1"}
NAME_WIDTH = max(map(len, COLOURS))
CLOSE_TIMEOUT_S = 2.0


class Console:
    """Writer to one stream, a line or a block at a time, without waiting for it.

    After a broken pipe it discards output; while the stream cannot be written, or nobody reads it, lines are lost. The
    parts keep running.
    """

    def __init__(self, stream: TextIO) -> None:
        """`stream` has a descriptor."""
        stream.flush()
        self._fd = stream.fileno()
        self._colour = stream.isatty()
        self._gone = False
        self._writer = BackgroundWriter("console", self._write_all, lambda _bytes, _reason: None, self._tell_lost)

    def print_line(self, text: str) -> None:
        """Write a line of the supervisor itself."""
        self.write(f"{self._paint('moiety')}: {text}\n")

    def print_ready(self, url: str) -> None:
        """Write the line that scripts wait for."""
        self.write(f"{self._paint('moiety')} is ready at {url}\n")

    def relay(self, part: str, line: str) -> None:
        """Write a line that a part printed."""
        self.write(f"{self._paint(part, NAME_WIDTH)} | {line}\n")

    def write(self, block: str) -> None:
        self._writer.put(block.encode("utf-8", errors="backslashreplace"))

    def close(self) -> None:
        """Write what is left, within seconds."""
        self._writer.close(CLOSE_TIMEOUT_S)

    def _write_all(self, block: bytes) -> None:
        try:
            while block and not self._gone:
                block = block[os.write(self._fd, block) :]
        except BrokenPipeError:
            self._gone = True

    def _tell_lost(self, num_bytes: int) -> None:
        self.print_line(f"{num_bytes} bytes of the output are missing above: they could not be written")

    def _paint(self, name: str, width: int = 0) -> str:
        padded = name.ljust(width)
        return f"\x1b[{COLOURS.get(name, '0')}m{padded}\x1b[0m" if self._colour else padded


def standard_console() -> Console:
    return Console(sys.stdout)
