"""Address of the socket between an engine server and its core, and the removal of stale sockets of killed processes.

The socket lies beside the gateways' socket if that is a file, so that the owner of its directory owns this socket too;
otherwise in a new directory under the system's temporary one. Both names contain the pid of their owner. A killed owner
cannot clean up, so the next engine server does. In another container with the same temporary directory, the same pid is
another process or none; therefore the owner also locks its directory as long as it lives.
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
    """New ipc address for the core of an engine server that listens on `listen`. Call `remove` at the end."""

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
    """Return a path beside the gateways' socket file; None if there is no file, or its name is too long."""
    name = listen.removeprefix(IPC)
    if name == listen or not name or name[0] in "@*":
        return None
    path = Path(f"{name}.core-{os.getpid()}")
    return path if len(os.fsencode(path)) < zmq.IPC_PATH_MAX_LEN else None


def _make_locked(pid: int) -> tuple[Path, int]:
    """Return a new directory for this user only, and the descriptor that holds its lock.

    The pid is added to its name only after it is locked.
    """
    made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}new-"))
    lock = os.open(made, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(made.with_name(made.name.replace("new", str(pid), 1))), lock


def _siblings_of(path: Path) -> re.Pattern[str]:
    return re.compile(re.escape(path.name.removesuffix(str(os.getpid()))) + r"(\d+)")


def _remove_stale(directory: Path, pattern: re.Pattern[str]) -> None:
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:  # the bind reports this, with the address
        return
    for entry in entries:
        found = pattern.fullmatch(entry.name)
        path = Path(entry.path)
        if found is not None and not _is_alive(int(found[1])) and _is_ours(path) and not _is_locked(path):
            _remove(path)


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except FileNotFoundError:  # another engine server was faster
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
    """Return whether a living owner holds the lock, possibly in another pid namespace."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # removed, or a plain socket, which is never locked
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
        shutil.rmtree(path, ignore_errors=True)  # ZeroMQ or another engine server may remove it at the same time
    else:
        path.unlink(missing_ok=True)
