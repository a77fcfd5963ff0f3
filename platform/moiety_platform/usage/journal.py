"""Usage journal: rows that the database could not take yet, as lines of JSON in the files of one folder.

Each process appends to a segment of its own, locked while the process lives; a segment whose process has ended, or that
was closed for replay, may be claimed by any process that shares the folder. Knows nothing of the database.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog

from moiety_platform.usage.row import StoredUsageRow, UsageRow

COMPACT_BYTES = 4 * 1024 * 1024  # size from which the live log is rewritten without stored rows
_SUFFIX = ".jsonl"

_log = structlog.get_logger(__name__)
_decoder = msgspec.json.Decoder(StoredUsageRow)
to_line: Callable[[UsageRow], bytes] = msgspec.json.Encoder().encode
"""Return a row as one line, without the line's end."""


class Segment:
    """Segment that this process has claimed: read it, then remove it, or release it for a later attempt."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._damaged: list[bytes] = []

    def read(self) -> list[UsageRow]:
        """Return the rows of the segment, the last of each request.

        Unreadable lines are skipped; a crash may leave the last line unreadable.
        """
        rows: dict[str, UsageRow] = {}
        self._damaged = []
        for line in self._path.read_bytes().splitlines():
            try:
                row = _decoder.decode(line).present
            except msgspec.MsgspecError:
                self._damaged.append(line)
            else:
                rows[row.request_id] = row
        return list(rows.values())

    def remove(self, keep_lines: Callable[[Sequence[bytes]], None]) -> None:
        """Delete the segment after its rows are stored and `keep_lines` has stored its unreadable lines."""
        if self._damaged:
            _log.error(
                "usage_journal_damaged",
                segment=self._path.name,
                num_lines=len(self._damaged),
                advice="keep the damaged lines: their usage is not in the database",
            )
            keep_lines(self._damaged)
        self._path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Release the segment, so that it can be claimed again. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Journal:
    """One process's access to the folder. Its methods are thread-safe; appending and claiming exclude each other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._own_path: Path | None = None
        self._own_descriptor = -1
        self._waiting = False

    @property
    def waiting(self) -> bool:
        """True if rows to replay may exist."""
        return self._waiting

    def open(self) -> None:
        """Look for segments of earlier processes. Raises OSError if the folder cannot be made."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock:
            self._waiting = any(self.directory.glob(f"*{_SUFFIX}"))

    def close(self) -> None:
        """Close this process's segment; its rows are replayed at the next start."""
        with self._lock:
            self._close_own()

    def append(self, rows: Sequence[UsageRow], *, sync: bool) -> None:
        """Append rows; with `sync` they are on disk when this returns. Raises OSError, and then appends none."""
        if not rows:
            return
        with self._lock:
            if self._own_path is None:
                self._open_own()
            append_lines(self._own_descriptor, b"".join(to_line(row) + b"\n" for row in rows), sync=sync)
            self._waiting = True

    def claim(self) -> Segment | None:
        """Claim one segment that no living process appends to; None if there is none left.

        This process's own segment is closed first, and can be claimed.
        """
        with self._lock:
            self._close_own()
            for path in sorted(self.directory.glob(f"*{_SUFFIX}")):
                segment = _lock_segment(path)
                if segment is not None:
                    return segment
            self._waiting = False
            return None

    def postpone(self, segment: Segment) -> None:
        """Release a claimed segment for the next replay."""
        segment.release()
        with self._lock:
            self._waiting = True

    def _open_own(self) -> None:
        self._own_path, self._own_descriptor = create_segment(self.directory)

    def _close_own(self) -> None:
        if self._own_path is not None:
            os.close(self._own_descriptor)
            self._own_path = None


def create_segment(directory: Path) -> tuple[Path, int]:
    """Create an empty segment of this process, locked as long as its descriptor is open. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{os.getpid()}-{secrets.token_hex(8)}{_SUFFIX}"
    draft = path.with_suffix(".new")  # no process claims a file of this name before it is locked
    descriptor = os.open(draft, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    draft.rename(path)
    return path, descriptor


def _lock_segment(path: Path) -> Segment | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None  # another process has stored and removed it meanwhile
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink > 0:
            return Segment(path, descriptor)
    except BlockingIOError:
        pass  # its process lives
    os.close(descriptor)
    return None


def append_lines(descriptor: int, data: bytes, *, sync: bool = False) -> None:
    """Append complete lines to a file that was opened with O_APPEND and that no other process appends to meanwhile.

    With `sync` they are on disk when this returns. Raises OSError; the file is then as it was before, because a part
    of a line, left by a full disk, would make the next line unreadable.
    """
    size = os.fstat(descriptor).st_size
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        if sync:
            os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


class LiveLog:
    """Live log of one process: the rows that are otherwise only in memory, so that they survive a killed process.

    Lines are written without waiting for the disk, so they survive the process, not the machine. The file is a segment
    of the journal: locked while its process lives, and replayed by a later process. The last of several lines of a
    request counts, so a running request is written as the row to store if nothing follows. It is created with the first
    row. Not thread-safe.

    No method raises: if the file cannot be written, rows exist only in memory, which is logged once, until `trim` has
    written all of them again.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path: Path | None = None
        self._descriptor = -1
        self._size = 0
        self._lacks_rows = False  # some could not be written

    def add(self, rows: Sequence[UsageRow]) -> None:
        """Write rows to the file."""
        try:
            if self._path is None:
                self._path, self._descriptor = create_segment(self._directory)
                self._size = 0
            lines = b"\n".join(map(to_line, rows)) + b"\n"
            append_lines(self._descriptor, lines)
            self._size += len(lines)
        except OSError as error:
            self._report(_log.error, "usage_live_log_failed", error)
            self._lacks_rows = True

    def trim(self, live: Sequence[UsageRow]) -> None:
        """Drop all rows but `live`, which are still only in memory.

        This happens at once if `live` is empty, else when the file has grown or lacks rows.
        """
        if not self._lacks_rows and (self._size == 0 or (live and self._size < COMPACT_BYTES)):
            return
        try:
            if live:
                self._rewrite(live)
            elif self._size:
                os.ftruncate(self._descriptor, 0)
                self._size = 0
            self._lacks_rows = False
        except OSError as error:  # rows that are left are replayed without effect, since each request counts once
            self._report(_log.warning, "usage_live_log_untrimmed", error)

    def _report(self, log: Callable[..., object], event: str, error: OSError) -> None:
        """Log the failure, unless it follows another one."""
        if not self._lacks_rows:
            advice = "check the free space and the permissions of the folder"
            log(event, error=str(error), directory=str(self._directory), advice=advice)

    def close(self, *, keep: bool) -> None:
        """Remove the file, or with `keep` leave it to the next start."""
        if self._path is None or keep:  # later rows are added to it, and it is locked until the process ends
            return
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._path = None

    def _rewrite(self, rows: Sequence[UsageRow]) -> None:
        """Write the rows to a new file, then remove the old one.

        A kill between the two leaves both, which is harmless.
        """
        data = b"".join(to_line(row) + b"\n" for row in rows)
        path, descriptor = create_segment(self._directory)
        try:
            append_lines(descriptor, data)
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        except OSError:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        if self._path is not None:
            os.close(self._descriptor)
        self._path, self._descriptor, self._size = path, descriptor, len(data)
