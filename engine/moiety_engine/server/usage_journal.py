"""The engine's own record of what requests used: one line of JSON each, the oracle against which bills are checked."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec


class UsageLine(msgspec.Struct, frozen=True):
    """One ended request; time and engine are filled in as it is written. Tokens are counts; `output_tokens` are all
    positions up to the end, also those that an engine before this one has generated."""

    at_unix_ns: int
    engine_id: str
    replica_id: str  # the gateway process
    request_id: str
    tenant_id: str
    model: str
    served_class: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class UsageJournal:
    """Appends to a file, a line a write, so that what is written survives the process. Rotate it by renaming: it is
    opened anew when its path is no longer the same file."""

    def __init__(self, path: Path, engine_id: str) -> None:
        """Raises OSError where the file cannot be written."""
        self._path = path
        self._engine_id = engine_id
        self._descriptor = self._open()

    def add(self, line: UsageLine) -> None:
        """Raises OSError if the disk is full."""
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
