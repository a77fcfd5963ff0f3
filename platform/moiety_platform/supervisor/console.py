"""Console output of `moiety serve`: whole lines, from the supervisor and from its parts."""

from __future__ import annotations

import sys
from typing import TextIO

COLOURS = {"engine": "36", "gateway": "32", "dashboard": "35", "moiety": "1"}
NAME_WIDTH = max(map(len, COLOURS))


class Console:
    """Writer to one stream, a line or a block at a time.

    After a broken pipe it discards output; the parts keep running.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._colour = stream.isatty()
        self._gone = False

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
        if self._gone:
            return
        try:
            self._stream.write(block)
            self._stream.flush()
        except BrokenPipeError:
            self._gone = True

    def _paint(self, name: str, width: int = 0) -> str:
        padded = name.ljust(width)
        return f"\x1b[{COLOURS.get(name, '0')}m{padded}\x1b[0m" if self._colour else padded


def standard_console() -> Console:
    return Console(sys.stdout)
