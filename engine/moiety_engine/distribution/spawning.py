"""Rank 0 starts the other ranks itself, on its own host, where no launcher has.

Each child gets its settings as one line of JSON on standard input, which then stays open: when rank 0 is gone it
closes, and a child that has not met it yet ends too.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

from moiety_engine.errors import RanksError

if TYPE_CHECKING:
    from collections.abc import Sequence

MODULE = "moiety_engine.core.following"
END_GRACE_S = 5.0
STANDARD_ERROR = 2


class Children:
    """The other ranks' processes. Used by one thread."""

    def __init__(self, first_lines: Sequence[bytes]) -> None:
        """One process for each line; the first one is rank 1."""
        self._processes = [self._start(line) for line in first_lines]

    def check(self) -> None:
        """Raises RanksError where one has ended."""
        for rank, process in enumerate(self._processes, start=1):
            code = process.poll()
            if code is not None:
                raise RanksError(f"rank {rank} ended with exit code {code} before it could join: its log says why")

    def wait(self) -> None:
        """Until all have ended; they have been told to."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_GRACE_S)
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    @staticmethod
    def _start(line: bytes) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=STANDARD_ERROR,  # standard output is rank 0's report
            start_new_session=True,  # an interrupt from the terminal is for rank 0
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `check` says that it has ended
            process.stdin.write(line + b"\n")
            process.stdin.flush()
        return process
