"""Folder of the tier's files: writing, reading, and the scan at the start.

Each identity has its own folder within the given one, so other models' files are left alone. A file is written under a
temporary name and renamed, so a kill at any byte leaves whole files and temporary files that are swept. Names are
random numbers. Any thread may call everything except opening and closing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import structlog

from moiety_engine.disk.index import Stored
from moiety_engine.disk.records import (
    KEPT_BYTES,
    BadFile,
    Buffer,
    Kept,
    owner_tag,
    read_blocks,
    read_head,
    read_header,
    read_kept,
    write_file,
    write_kept,
)
from moiety_engine.errors import InvalidConfig

SUFFIX = ".kv"
_UNFINISHED = ".tmp"
_LOCK = "lock"
_IDENTITY = re.compile(r"(?:[0-9a-f]{2})+")

log = structlog.get_logger()


class ReadOutcome(StrEnum):
    """Outcome of reading a file."""

    DONE = "done"
    FILE_IS_BAD = "file_is_bad"  # gone, or bad and removed
    NOT_AVAILABLE = "not_available"  # nothing is known about the file, and a rank may still fill the rows


class Folder(Protocol):
    """Files of the tier, of one rank or of all ranks of a group. A block is a row of `Rows`, as `view` returns it."""

    identity: bytes
    block_bytes: int
    path: Path

    def scan(self) -> Iterator[Stored]: ...
    def write(self, owner: bytes, hashes: Sequence[bytes], blocks: Sequence[Any], kept: Kept | None = None) -> Stored:
        """Write a new file. Raises OSError, and then leaves nothing behind."""
        ...

    def read(self, name: str, wanted: Sequence[tuple[bytes, Any]]) -> ReadOutcome:
        """Fill each row with the block of its hash."""
        ...

    def remove_of(self, tenant_ids: Collection[str]) -> int: ...
    def touch(self, name: str) -> None: ...
    def keep(self, name: str, kept: Kept) -> None: ...
    def remove(self, name: str) -> None: ...
    def close(self) -> None: ...


class DiskFolder:
    """Folder of the tier, locked until it is closed. Raises InvalidConfig where the lock is not available."""

    def __init__(self, parent: Path, identity: bytes, block_bytes: int) -> None:
        self.identity, self.block_bytes = identity, block_bytes
        self._opened_s = time.time()
        self.path = parent / identity.hex()
        try:
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.mkdir(exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as exc:
            raise InvalidConfig(f"--disk-cache {parent} cannot be used: {exc.strerror}; choose another folder") from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._lock)
            raise InvalidConfig(
                f"--disk-cache {parent}: another engine of this model uses this folder; give each engine its own folder"
            ) from exc

    def scan(self, *, is_old_only: bool = False) -> Iterator[Stored]:
        """Yield the existing files in the order of their last use; remove torn ones and those of other tiers.

        `is_old_only` leaves out the files that were written or used since the folder was opened.
        """
        with os.scandir(self.path) as entries:
            found = [(entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in entries if entry.is_file()]
        for used_s, name in sorted(found):
            if name.endswith(_UNFINISHED):
                if used_s < self._opened_s:  # otherwise it is being written now
                    self.remove(name)
            elif name.endswith(SUFFIX) and not (is_old_only and used_s >= self._opened_s):
                stored = self._read_entry(name, used_s)
                if stored is not None:
                    yield stored

    def write(
        self,
        owner: bytes,
        hashes: Sequence[bytes],
        blocks: Sequence[Buffer],
        kept: Kept | None = None,
        name: str = "",
    ) -> Stored:
        """Write a new file, under a random name unless one is given. Raises OSError, and then leaves nothing behind."""
        name = name or new_name()
        unfinished = self.path / (name + _UNFINISHED)
        try:
            with open(unfinished, "xb", opener=_for_us_alone) as file:
                num_bytes = write_file(file, self.identity, owner, hashes, blocks, kept)
            unfinished.rename(self.path / name)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        return Stored(name, num_bytes, tuple(hashes), owner, time.time(), kept)

    def read(self, name: str, wanted: Sequence[tuple[bytes, Buffer]]) -> ReadOutcome:
        """Fill each buffer with the block of its hash. A bad file is removed."""
        try:
            with (self.path / name).open("rb") as file:
                read_blocks(file, self.identity, wanted)
        except FileNotFoundError:
            return ReadOutcome.FILE_IS_BAD
        except (BadFile, OSError) as exc:
            self._remove_bad(name, exc)
            return ReadOutcome.FILE_IS_BAD
        return ReadOutcome.DONE

    def remove_of(self, tenant_ids: Collection[str]) -> int:
        """Remove these tenants' files from the folders of other identities; return the number of files.

        No engine opens those folders any more; an engine that still does treats the files as lost.
        """
        num_files = 0
        for folder in self.path.parent.iterdir():
            if folder == self.path or not _IDENTITY.fullmatch(folder.name):
                continue
            owners = {owner_tag(one, bytes.fromhex(folder.name)) for one in tenant_ids}
            for path in folder.glob(f"*{SUFFIX}*"):  # including unfinished files of a kill
                with contextlib.suppress(BadFile, OSError):
                    with path.open("rb") as file:
                        is_theirs = read_head(file)[0].owner in owners
                    if is_theirs:
                        path.unlink()
                        num_files += 1
        return num_files

    def touch(self, name: str) -> None:
        """Mark the file as used now, also for later engines."""
        with contextlib.suppress(OSError):
            os.utime(self.path / name)

    def keep(self, name: str, kept: Kept) -> None:
        """Mark the file as used now and retained, also for later engines."""
        with contextlib.suppress(OSError), (self.path / name).open("r+b") as file:
            write_kept(file, kept)

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.path / name).unlink(missing_ok=True)

    def _remove_bad(self, name: str, error: BadFile | OSError) -> None:
        log.warning(
            "disk_cache_file_removed",
            file=name,
            reason=str(error),
            advice="none needed: the prompt is computed again",
        )
        self.remove(name)

    def close(self) -> None:
        os.close(self._lock)

    def _read_entry(self, name: str, used_s: float) -> Stored | None:
        try:
            with (self.path / name).open("rb") as file:
                header, start = read_header(file, self.identity, self.block_bytes)
                kept = read_kept(file)
        except (BadFile, OSError) as exc:
            self._remove_bad(name, exc)
            return None
        num_bytes = start + len(header.hashes) * header.block_bytes + KEPT_BYTES
        return Stored(name, num_bytes, tuple(header.hashes), header.owner, used_s, kept)


def new_name() -> str:
    """Return a random name for a file."""
    return secrets.token_hex(16) + SUFFIX


def _for_us_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
