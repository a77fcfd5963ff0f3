"""Data directory of a local serve: its layout, its lock and its secrets.

moiety.db      tenants, keys, usage            keys.json    the keys of the first start, 0600
traces.db      kept traces
pepper         key of the keys' hashes, 0600   serve.url    the last URL of the gateway
pepper.previous  the previous pepper, during its rotation
logs/NAME.log  output of each part             serve.lock   held while a serve runs
run/           sockets between the parts, counts of the supervisor
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from moiety_platform.private_files import write_private
from moiety_platform.supervisor.errors import DataDirInUse, SupervisorError

PRIVATE_UMASK = 0o077  # for every process that writes here, also if the directory already existed
KEYS_FILE = "keys.json"
PREVIOUS_PEPPER = "pepper.previous"  # present during a pepper rotation
URL_FILE = "serve.url"
MAX_SOCKET_PATH_BYTES = 90  # the kernel's limit is 107, and the name gets a little longer


@dataclass(frozen=True, slots=True)
class FirstKeys:
    """Keys that the first start created: the owner's, and one key of a tenant for the first requests."""

    admin_key: str = field(repr=False)
    tenant: str
    tenant_key: str = field(repr=False)


class DataDir:
    """Data directory, locked while it is open. Opening it a second time raises DataDirInUse."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock_fd: int | None = None

    def __enter__(self) -> Self:
        try:
            for folder in (self.path, self.path / "logs", self.path / "run"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise SupervisorError(
                f"cannot create the data directory {self.path} ({exc.strerror}); choose another with --data-dir"
            ) from exc
        self._lock()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _lock(self) -> None:
        fd = os.open(self.path / "serve.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = os.read(fd, 32).decode().strip()
            os.close(fd)
            raise DataDirInUse(
                f"{self.path} is in use by another moiety serve (process {holder or 'unknown'}); "
                "stop that one, or choose another --data-dir"
            ) from exc
        self._lock_fd = fd
        os.ftruncate(fd, 0)
        with contextlib.suppress(OSError):  # on a full disk the lock names no process
            os.write(fd, str(os.getpid()).encode())

    @property
    def database_path(self) -> Path:
        return self.path / "moiety.db"

    @property
    def pepper_path(self) -> Path:
        return self.path / "pepper"

    @property
    def unacknowledged_usage_path(self) -> Path:
        """Return the path of the engine's unacknowledged usage: usage that the gateway has not stored yet.

        The file keeps its name of version 0.1.0, so that an upgrade loses no usage.
        """
        return self.path / "unsettled-usage"

    @property
    def keys_path(self) -> Path:
        return self.path / KEYS_FILE

    def check_pepper(self) -> None:
        """Raise SupervisorError if there are keys but not the pepper they were hashed with.

        Without it the gateway would create a new pepper, under which every key is unknown.
        """
        replaced = (self.path / PREVIOUS_PEPPER).exists()  # the gateway creates the new pepper and accepts keys of both
        if self.database_path.exists() and not self.pepper_path.exists() and not replaced:
            raise SupervisorError(
                f"{self.pepper_path} is missing but {self.database_path} exists; its keys are worthless without it: "
                "restore the file, or choose another --data-dir"
            )

    def engine_socket(self) -> Path:
        """Return the path of the engine's socket: in the directory, or in a private temporary one if it is too long."""
        inside = self.path / "run" / "engine.sock"
        if len(os.fsencode(inside)) <= MAX_SOCKET_PATH_BYTES:
            return inside
        return Path(tempfile.mkdtemp(prefix="moiety-")) / "engine.sock"

    @property
    def logs_path(self) -> Path:
        return self.path / "logs"

    @property
    def status_path(self) -> Path:
        """Return the path of the supervisor's counts, which the gateway reads."""
        return self.path / "run" / "supervisor.json"

    def write_url(self, url: str) -> None:
        write_private(self.path / URL_FILE, f"{url}\n".encode())


def read_url(data_dir: Path) -> str | None:
    """Return the gateway's URL from the last serve on this directory; None if there was none."""
    path = data_dir / URL_FILE
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def read_first_keys(data_dir: Path) -> FirstKeys | None:
    """Return the keys of the first start; None if there was none. Raises SupervisorError for a damaged file."""
    path = data_dir / KEYS_FILE
    if not path.exists():
        return None
    try:
        return FirstKeys(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as exc:
        raise SupervisorError(f"{path} is damaged; delete it, and the next start creates new keys") from exc


def write_first_keys(path: Path, keys: FirstKeys) -> None:
    write_private(path, json.dumps(asdict(keys), indent=2).encode() + b"\n")
