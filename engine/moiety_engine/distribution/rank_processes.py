"""Child processes for the other ranks, which rank 0 starts on its own host if there is no launcher.

Each child gets its settings as one line of JSON on standard input, which then stays open. When rank 0 ends, it closes,
and a child that has not joined yet ends too.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MODULE = "moiety_engine.core.worker"
END_GRACE_S = 5.0
STANDARD_ERROR = 2


class RankProcesses:
    """The processes of the other ranks. Used by one thread."""

    def __init__(self, first_lines: Mapping[int, bytes]) -> None:
        """Start one process per rank."""
        self._processes = {rank: self._start(line) for rank, line in first_lines.items()}
        self._dismissed: list[subprocess.Popen[bytes]] = []  # that may not have ended yet

    def ended(self) -> dict[int, str]:
        """Return the ranks whose processes have ended, with a message for each."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {
            rank: f"rank {rank} ended with exit code {code} before all ranks had joined: see its log"
            for rank, code in codes.items()
            if code is not None
        }

    def add(self, first_lines: Mapping[int, bytes]) -> None:
        """Start further processes. A former process with the same rank must have been dismissed."""
        for rank, line in first_lines.items():  # those that were started are known if a later one cannot be
            self._processes[rank] = self._start(line)

    def dismiss(self, ranks: Iterable[int], *, kill: bool = False) -> None:
        """Expect these processes to end, or kill them; their ranks may be used by other processes."""
        for process in [self._processes.pop(rank) for rank in ranks if rank in self._processes]:
            if kill:
                process.kill()
            self._dismissed.append(process)
        self._dismissed = [process for process in self._dismissed if not self._has_ended(process)]

    def wait(self) -> None:
        """Wait until all stopped processes have ended; kill those that exceed the grace period."""
        for process in (*self._processes.values(), *self._dismissed):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_GRACE_S)
        self.kill()

    def kill(self) -> None:
        for process in (*self._processes.values(), *self._dismissed):
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    @staticmethod
    def _has_ended(process: subprocess.Popen[bytes]) -> bool:
        if process.poll() is None:
            return False
        assert process.stdin is not None
        process.stdin.close()
        return True

    @staticmethod
    def _start(line: bytes) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=STANDARD_ERROR,  # standard output is reserved for rank 0's report
            start_new_session=True,  # a terminal interrupt must only reach rank 0
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `ended` reports that it has ended
            process.stdin.write(line + b"\n")
            process.stdin.flush()
        return process
