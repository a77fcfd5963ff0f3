"""The folder that the tier's files lie in: writing, reading, and what is found at the start.

Each identity has a folder of its own within the one that was given, so other models' files are left alone. A file is
written under a temporary name and renamed, so a kill at any byte leaves whole files and rubbish that is swept. Names
are random numbers. All of it may be called by any thread but for opening and closing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

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


class DiskFolder:
    """Holds a lock on its folder until it is closed. Raises InvalidConfig where it cannot be had."""

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
                f"--disk-cache {parent}: another engine of this model uses it; give each engine a folder of its own"
            ) from exc

    def scan(self) -> Iterator[Stored]:
        """The files that are there, in the order of their last use. Those that are torn or not of this tier are
        removed."""
        with os.scandir(self.path) as entries:
            found = [(entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in entries if entry.is_file()]
        for used_s, name in sorted(found):
            if name.endswith(_UNFINISHED):
                if used_s < self._opened_s:  # else it is being written now
                    self.remove(name)
            elif name.endswith(SUFFIX):
                stored = self._look_at(name, used_s)
                if stored is not None:
                    yield stored

    def write(
        self, owner: bytes, hashes: Sequence[bytes], blocks: Sequence[Buffer], kept: Kept | None = None
    ) -> Stored:
        """A new file. Raises OSError; nothing is left behind then."""
        name = secrets.token_hex(16) + SUFFIX
        unfinished = self.path / (name + _UNFINISHED)
        try:
            with open(unfinished, "xb", opener=_for_us_alone) as file:
                num_bytes = write_file(file, self.identity, owner, hashes, blocks, kept)
            unfinished.rename(self.path / name)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        return Stored(name, num_bytes, tuple(hashes), owner, time.time(), kept)

    def read(self, name: str, wanted: Sequence[tuple[bytes, Buffer]]) -> bool:
        """Fill each buffer with the block of that hash. False: the file is gone, or was not good and is gone now."""
        try:
            with (self.path / name).open("rb") as file:
                read_blocks(file, self.identity, wanted)
        except FileNotFoundError:
            return False
        except (BadFile, OSError) as exc:
            log.warning("disk_cache_file_removed", file=name, reason=str(exc))
            self.remove(name)
            return False
        return True

    def remove_of(self, tenant_ids: Collection[str]) -> int:
        """Remove what these tenants have left in the folders of other identities beside this one, which no engine may
        look into any more; how many files. An engine that does takes those for lost."""
        num_files = 0
        for folder in self.path.parent.iterdir():
            if folder == self.path or not _IDENTITY.fullmatch(folder.name):
                continue
            owners = {owner_tag(one, bytes.fromhex(folder.name)) for one in tenant_ids}
            for path in folder.glob(f"*{SUFFIX}*"):  # and what a kill has left unfinished
                with contextlib.suppress(BadFile, OSError):
                    with path.open("rb") as file:
                        is_theirs = read_head(file)[0].owner in owners
                    if is_theirs:
                        path.unlink()
                        num_files += 1
        return num_files

    def touch(self, name: str) -> None:
        """It was used now, also for whoever starts later."""
        with contextlib.suppress(OSError):
            os.utime(self.path / name)

    def keep(self, name: str, kept: Kept) -> None:
        """It was used now, and is kept so long, also for whoever starts later."""
        with contextlib.suppress(OSError), (self.path / name).open("r+b") as file:
            write_kept(file, kept)

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)

    def _look_at(self, name: str, used_s: float) -> Stored | None:
        try:
            with (self.path / name).open("rb") as file:
                header, start = read_header(file, self.identity, self.block_bytes)
                kept = read_kept(file)
        except (BadFile, OSError) as exc:
            log.warning("disk_cache_file_removed", file=name, reason=str(exc))
            self.remove(name)
            return None
        num_bytes = start + len(header.hashes) * header.block_bytes + KEPT_BYTES
        return Stored(name, num_bytes, tuple(header.hashes), header.owner, used_s, kept)


def _for_us_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
