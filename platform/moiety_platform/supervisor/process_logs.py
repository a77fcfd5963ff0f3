"""Logs of the parts in the data directory, each written by a thread of its own; a log that fails stops no part."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from moiety_platform.disk_full import is_disk_full
from moiety_platform.supervisor.background_writer import BackgroundWriter
from moiety_platform.supervisor.console import Console
from moiety_platform.supervisor.log_file import LogFile, LogRotation
from moiety_platform.supervisor_status import SupervisorStatus

CLOSE_TIMEOUT_S = 2.0


class ProcessLogs:
    """Logs by part, created at their first use. Losses are reported on the console, once each time, and counted."""

    def __init__(self, folder: Path, rotation: LogRotation, console: Console, status: SupervisorStatus) -> None:
        self._folder = folder
        self._rotation = rotation
        self._console = console
        self._status = status
        self._logs: dict[str, tuple[LogFile, BackgroundWriter]] = {}
        self._failing: set[str] = set()

    def path(self, part: str) -> Path:
        return self._folder / f"{part}.log"

    def writer(self, part: str) -> BackgroundWriter:
        """Return the writer of a part's log."""
        if part not in self._logs:
            file = LogFile(self.path(part), self._rotation)
            writer = BackgroundWriter(
                f"{part} log", file.write, partial(self._tell_lost, part), partial(self._tell_written, part)
            )
            self._logs[part] = file, writer
        return self._logs[part][1]

    def reopen(self) -> None:
        """Open all files again, as after their rotation by another program."""
        for file, writer in self._logs.values():
            file.reopen()
            writer.put(b"")  # opens the file

    def close(self) -> None:
        """Write what is left, within seconds."""
        for file, writer in self._logs.values():
            writer.close(CLOSE_TIMEOUT_S)
            file.close()

    def _tell_lost(self, part: str, num_bytes: int, reason: OSError) -> None:
        self._status.count_lost(part, num_bytes)
        if part in self._failing:
            return
        self._failing.add(part)
        self._console.print_line(f"{self._describe(part, reason)}: until then, the output of the {part} is not logged")

    def _describe(self, part: str, reason: OSError) -> str:
        path = self.path(part)
        if is_disk_full(reason):
            return f"the disk is full ({path}: {reason.strerror}); free some space on it"
        return f"{path} cannot be written ({reason.strerror}); correct that"

    def _tell_written(self, part: str, num_bytes: int) -> None:
        self._failing.discard(part)
        self._console.print_line(f"{self.path(part)} is written again; {num_bytes} bytes are missing in it")
