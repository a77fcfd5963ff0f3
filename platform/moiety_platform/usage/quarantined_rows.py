"""Quarantined usage rows: a file of rows that the database refuses for their content, and one of damaged lines.

The files are beside the journal. Their rows are not billed, so reconciliation counts them until `restore` has written
them to the database. Knows the folder, and the database only through the function that it is given.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from moiety_platform.usage.journal import append_lines
from moiety_platform.usage.row import StoredUsageRow, UsageRow

REFUSED = "refused.txt"
DAMAGED = "damaged.txt"
MAX_SHOWN = 100
_CLAIMED = ".restoring"  # suffix of a file while its rows are written back
_LOCK = "quarantine.lock"

_decoder = msgspec.json.Decoder(StoredUsageRow)


class QuarantinedUsageRow(msgspec.Struct, frozen=True):
    """A usage row that is not billed."""

    request_id: str
    tenant_id: str
    started_at: str


class QuarantinedUsageReport(msgspec.Struct, frozen=True):
    """Usage that is not billed: rows that the database refused, and unreadable lines.

    At most MAX_SHOWN of the rows are listed.
    """

    rows: int = 0
    unreadable_lines: int = 0
    shown: list[QuarantinedUsageRow] = []

    @property
    def total(self) -> int:
        """Number of rows and lines."""
        return self.rows + self.unreadable_lines


EMPTY_QUARANTINE_REPORT = QuarantinedUsageReport()


class QuarantinedUsage:
    """Files of quarantined rows in one folder, which several processes may use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add_row(self, row: UsageRow) -> None:
        """Keep a row that the database refuses. It is on disk when this returns. Raises OSError."""
        with self._locked():
            self._append(REFUSED, [msgspec.json.encode(row)])

    def add_damaged(self, lines: Sequence[bytes]) -> None:
        """Keep unreadable lines of the journal. They are on disk when this returns. Raises OSError."""
        with self._locked():
            self._append(DAMAGED, lines)

    def report(self) -> QuarantinedUsageReport:
        """Count the quarantined rows and lines. Raises OSError if a file cannot be read."""
        rows: dict[str, UsageRow] = {}
        unreadable = 0
        for line in self._lines():
            row = _row_of(line)
            if row is None:
                unreadable += 1
            else:
                rows[row.request_id] = row
        shown = [
            QuarantinedUsageRow(row.request_id, row.tenant_id, row.started_at.isoformat())
            for row in list(rows.values())[:MAX_SHOWN]
        ]
        return QuarantinedUsageReport(len(rows), unreadable, shown)

    async def restore(self, store: Callable[[UsageRow], Awaitable[bool]]) -> tuple[int, int]:
        """Store each row and remove the stored ones; return how many were stored, and how many rows and lines remain.

        `store` returns whether the database took the row, and raises if the database is away; then everything remains.
        A row that is already in the database counts once, so an interrupted restore can be repeated.
        """
        for name in (REFUSED, DAMAGED):
            self._claim(name)
        num_restored = num_left = 0
        for name in (REFUSED, DAMAGED):
            claimed = self.directory / (name + _CLAIMED)
            if not claimed.exists():
                continue
            left = []
            for line in claimed.read_bytes().splitlines():
                row = _row_of(line)
                if row is not None and await store(row):
                    num_restored += 1
                elif line:
                    left.append(line)
            with self._locked():
                self._append(name, left)
                claimed.unlink()
            num_left += len(left)
        return num_restored, num_left

    def _claim(self, name: str) -> None:
        """Move the content of a file to its claimed file, which may hold lines of an interrupted restore."""
        path, claimed = self.directory / name, self.directory / (name + _CLAIMED)
        if not path.exists():
            return
        with self._locked():
            if claimed.exists():
                self._append(claimed.name, path.read_bytes().splitlines())
                path.unlink()
            else:
                path.rename(claimed)

    def _lines(self) -> Iterator[bytes]:
        for name in (REFUSED, DAMAGED):
            for path in (self.directory / name, self.directory / (name + _CLAIMED)):
                try:
                    data = path.read_bytes()
                except FileNotFoundError:
                    continue
                yield from (line for line in data.splitlines() if line)

    def _append(self, name: str, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        descriptor = os.open(self.directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            append_lines(descriptor, b"".join(line + b"\n" for line in lines), sync=True)
        finally:
            os.close(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other processes from adding or claiming meanwhile."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _row_of(line: bytes) -> UsageRow | None:
    try:
        return _decoder.decode(line).present
    except msgspec.MsgspecError:
        return None
