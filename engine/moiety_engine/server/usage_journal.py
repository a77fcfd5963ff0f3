"""The engine's own record of usage, one line of JSON per request, against which bills are verified."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec


class UsageLine(msgspec.Struct, frozen=True):
    """Usage of one ended request; the time and the engine are filled in when it is written.

    Tokens are counts. `output_tokens` counts all positions up to the end, including those that an earlier engine
    generated.
    """

    at_unix_ns: int
    engine_id: str
    replica_id: str  # gateway process
    request_id: str
    tenant_id: str
    model: str
    served_class: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    expert_read_bytes: int = 0
    expert_moved_bytes: int = 0


class UsageJournal:
    """Appends to a file, one line per write, so that written lines survive the process.

    Rotate the file by renaming it: the journal opens its path again when it is no longer the same file.
    """

    def __init__(self, path: Path, engine_id: str) -> None:
        """Open the file. Raises OSError if it cannot be written."""
        self._path = path
        self._engine_id = engine_id
        self._descriptor = self._open()

    def add(self, line: UsageLine) -> None:
        """Append a line. Raises OSError if the disk is full."""
        if not self._is_in_place():
            os.close(self._descriptor)
            self._descriptor = self._open()
        line = msgspec.structs.replace(line, at_unix_ns=time.time_ns(), engine_id=self._engine_id)
        os.write(self._descriptor, msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False
