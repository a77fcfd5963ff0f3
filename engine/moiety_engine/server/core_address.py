"""Where the socket between a front and its core lives, and the removal of what killed fronts have left behind.

Beside the gateways' socket where that is a file, so that whoever owns its directory owns this one too; otherwise in a
directory of its own under the system's temporary one. Both names carry the pid of their owner: an owner that was
killed cannot clean up, so the next front does. In another container that has the same temporary directory the same pid
is another process or none, so a directory is locked by its owner as well, for as long as that lives.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

import zmq

IPC = "ipc://"
PREFIX = "moiety-core-"


class CoreAddress:
    """A fresh ipc address for the core of a front that listens on `listen`. `remove` it at the end."""

    def __init__(self, listen: str = "") -> None:
        beside = _beside(listen)
        self._lock: int | None = None
        if beside is not None:
            self._path = self._socket_path = beside
            _remove_stale(beside.parent, _siblings_of(beside))
        else:
            _remove_stale(Path(tempfile.gettempdir()), re.compile(re.escape(PREFIX) + r"(\d+)-\w+"))
            self._path, self._lock = _make_locked(os.getpid())
            self._socket_path = self._path / "core.sock"

    def __str__(self) -> str:
        return f"{IPC}{self._socket_path}"

    def remove(self) -> None:
        _remove(self._path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _beside(listen: str) -> Path | None:
    """None where gateways use no file, or one whose name leaves no room for a longer one."""
    name = listen.removeprefix(IPC)
    if name == listen or not name or name[0] in "@*":
        return None
    path = Path(f"{name}.core-{os.getpid()}")
    return path if len(os.fsencode(path)) < zmq.IPC_PATH_MAX_LEN else None


def _make_locked(pid: int) -> tuple[Path, int]:
    """A directory for this user only, and the descriptor that holds its lock. It has no pid in its name until then."""
    made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}new-"))
    lock = os.open(made, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(made.with_name(made.name.replace("new", str(pid), 1))), lock


def _siblings_of(path: Path) -> re.Pattern[str]:
    return re.compile(re.escape(path.name.removesuffix(str(os.getpid()))) + r"(\d+)")


def _remove_stale(directory: Path, pattern: re.Pattern[str]) -> None:
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:  # the bind will say so, with the address
        return
    for entry in entries:
        found = pattern.fullmatch(entry.name)
        path = Path(entry.path)
        if found is not None and not _is_alive(int(found[1])) and _is_ours(path) and not _is_locked(path):
            _remove(path)


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except FileNotFoundError:  # another front was quicker
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _is_locked(path: Path) -> bool:
    """By an owner that lives, perhaps where its pid means nothing here."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # gone, or a socket of its own, which nobody locks
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)  # ZeroMQ or another front may be removing it at this moment
    else:
        path.unlink(missing_ok=True)
