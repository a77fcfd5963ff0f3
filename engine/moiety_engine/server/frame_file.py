"""File of frames: each frame is stored completely or not at all, even if a process is killed.

Independent of the content.

A frame is its length, its checksum and its bytes, written at once. Only one process uses the file at a time. Nothing is
synced to disk, so written frames survive the process, but not a crash of the machine.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from pathlib import Path

import structlog

from moiety_engine.errors import InvalidConfig

_HEAD = struct.Struct(">II")  # bytes of the frame, their CRC-32

log = structlog.get_logger()


class FrameFile:
    """File of frames, locked from `open` to `close`. Not thread-safe."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.num_bytes = 0

    @classmethod
    def open(cls, path: Path) -> FrameFile:
        """Open and lock the file. Raises InvalidConfig if it cannot be written, or another engine uses it."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as exc:
            raise InvalidConfig(f"--unacknowledged-usage {path} cannot be written: {exc.strerror}") from exc
        if not _is_ours(path, descriptor):
            os.close(descriptor)
            raise InvalidConfig(
                f"--unacknowledged-usage {path} is in use by another engine; give each engine its own file"
            )
        return cls(path, descriptor)

    def read(self) -> list[bytes]:
        """Return all frames. Data from the first damaged frame on is moved to a second file."""
        data, frames, at = self._path.read_bytes(), [], 0
        while at < len(data):
            frame = _frame_at(data, at)
            if frame is None:
                log.error(
                    "unacknowledged_usage_damaged",
                    num_bytes=len(data) - at,
                    kept_in=str(self._damaged_file),
                    advice="keep the saved file: its usage is not in the database",
                )
                self.save_damaged(data[at:])
                break
            frames.append(frame)
            at += _HEAD.size + len(frame)
        self.num_bytes = len(data)
        return frames

    @property
    def _damaged_file(self) -> Path:
        return self._path.with_name(f"{self._path.name}.damaged")

    def save_damaged(self, data: bytes) -> None:
        """Save unusable data to the second file for manual inspection."""
        with self._damaged_file.open("ab") as file:
            file.write(data)

    def append(self, frame: bytes) -> None:
        """Append a frame. Raises OSError; the file may then end with a damaged frame."""
        self.num_bytes += _HEAD.size + len(frame)  # also if only a part is written
        _write(self._descriptor, frame)

    def replace(self, frame: bytes) -> None:
        """Replace the content of the file by this frame, or by nothing if it is empty.

        Raises OSError, and then the file is unchanged.
        """
        if not frame:
            os.ftruncate(self._descriptor, 0)
            self.num_bytes = 0
            return
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        descriptor = os.open(draft, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # before another process can open it
            _write(descriptor, frame)
            draft.replace(self._path)
        except OSError:
            draft.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self.num_bytes = descriptor, _HEAD.size + len(frame)

    def close(self) -> None:
        os.close(self._descriptor)


def _is_ours(path: Path, descriptor: int) -> bool:
    """Return whether the lock was acquired, and the file was not replaced while it was opened."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except (BlockingIOError, FileNotFoundError):
        return False


def _frame_at(data: bytes, at: int) -> bytes | None:
    if len(data) - at < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack_from(data, at)
    frame = data[at + _HEAD.size : at + _HEAD.size + length]
    return frame if len(frame) == length and zlib.crc32(frame) == checksum else None


def _write(descriptor: int, frame: bytes) -> None:
    """Write a frame completely. Raises OSError."""
    data = memoryview(_HEAD.pack(len(frame), zlib.crc32(frame)) + frame)
    while data:
        data = data[os.write(descriptor, data) :]
