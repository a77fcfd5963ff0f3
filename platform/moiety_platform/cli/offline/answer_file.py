"""Output file of a run: one answer per line, each written at once.

However the process ends, at most one line is incomplete, and the next run continues after the last complete one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from moiety_platform.batches.answers import ID_PREFIX
from moiety_platform.cli.errors import CommandError

_BEGINNING = b'{"id":"' + ID_PREFIX.encode()


class _Answer(msgspec.Struct, frozen=True):
    """Identifying fields of an answer."""

    id: str
    custom_id: str


class AnswerFile:
    """Output file, open and locked. `keys` has the line key of each answered custom_id."""

    def __init__(self, path: Path) -> None:
        """Open the file, which may hold answers.

        Raises CommandError if it holds anything else, or another run writes it.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as exc:
            raise CommandError(f"{path} cannot be written: {exc.strerror}; give another --output") from exc
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.keys: Mapping[str, str] = self._read()
        except BlockingIOError as exc:
            os.close(self._fd)
            raise CommandError(f"another run writes {path}; wait for its end, or give another --output") from exc
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._fd)
        os.close(self._fd)

    def add(self, line: bytes) -> None:
        """Append a line. Raises CommandError if the file cannot be written."""
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as exc:
            message = (
                f"{self.path} cannot be written to: {exc.strerror}; free space, and run the same command to continue"
            )
            raise CommandError(message) from exc

    def _read(self) -> dict[str, str]:
        keys: dict[str, str] = {}
        end = 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    self._cut(end, line)
                    break
                try:
                    answer = msgspec.json.decode(line, type=_Answer)
                except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
                    raise self._other_input(number) from exc
                if not answer.id.startswith(ID_PREFIX):
                    raise self._other_input(number)
                keys[answer.custom_id] = answer.id.removeprefix(ID_PREFIX)
                end += len(line)
        return keys

    def _cut(self, end: int, torn: bytes) -> None:
        """Remove the last, incomplete line, in which a run ended; nothing else is ever removed."""
        if not (torn.startswith(_BEGINNING) or _BEGINNING.startswith(torn)):
            raise CommandError(f"{self.path} ends with a line that is not a valid answer; give another --output")
        os.ftruncate(self._fd, end)

    def _other_input(self, number: int) -> CommandError:
        return CommandError(f"line {number} of {self.path} is not a valid answer of a run; give another --output")
