"""Log of usage that no gateway has acknowledged, so that it survives the engine.

A few times a second one frame of changes is appended: admitted requests with their billing contexts, their progress,
and acknowledgements. The next engine reads the file. When the file has grown, it is rewritten with the usage that is
still unacknowledged. If the file cannot be written, the error is logged once, and until it can be written the usage is
only in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from moiety_engine.server.frame_file import FrameFile
from moiety_wire.messages import MeteredUsage

FLUSH_S = 0.1
COMPACT_BYTES = 2**20  # smallest size at which the file is compacted
GROWTH = 4  # growth since the last compaction at which the file is compacted

Key = tuple[str, str]  # gateway process, request


class Running(Protocol):
    """Admitted request that has not ended."""

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def num_output(self) -> int: ...

    def metered(self, replica_id: str) -> MeteredUsage:
        """Return the usage so far."""
        ...


class _Noted(msgspec.Struct, frozen=True, array_like=True, tag="noted"):
    number: int  # its number in later entries
    record: MeteredUsage


class _Counted(msgspec.Struct, frozen=True, array_like=True, tag="counted"):
    number: int
    num_cached_tokens: int
    num_output_tokens: int


class _AcknowledgedEntry(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    number: int


_Entry = _Noted | _Counted | _AcknowledgedEntry
_decoder = msgspec.msgpack.Decoder(list[_Entry])

log = structlog.get_logger()


class UnacknowledgedUsageLog:
    """Owns the file. Used by one thread, except for the writing itself."""

    def __init__(self, path: Path) -> None:
        """Open the log. Raises InvalidConfig if the file is unusable."""
        self._file = FrameFile.open(path)
        self._written: dict[Key, tuple[int, int, int]] = {}  # number, cached tokens, output tokens
        self._num_noted = 0
        self._num_bytes_whole = 0  # size after the last rewrite
        self._is_behind = True  # the file must be rewritten
        self._is_failing = False

    def read(self) -> list[MeteredUsage]:
        """Return the usage that an earlier engine has left."""
        found: dict[int, MeteredUsage] = {}
        for frame in self._file.read():
            try:
                entries = _decoder.decode(frame)
            except msgspec.MsgspecError as error:
                log.error(
                    "unacknowledged_usage_undecodable",
                    error=str(error),
                    num_bytes=len(frame),
                    advice="keep the saved file: its usage is not in the database",
                )
                self._file.save_damaged(frame)
                continue
            for entry in entries:
                _replay(found, entry)
        return list(found.values())

    async def write(
        self, running: Mapping[Key, Running], ended: Mapping[Key, MeteredUsage], changed: Collection[Key]
    ) -> None:
        """Write the changes since the last call. Never raises; await one call before the next.

        These are the counts of running requests, and the requests in `changed`, which have ended or were acknowledged.
        """
        is_large = self._file.num_bytes > max(COMPACT_BYTES, GROWTH * self._num_bytes_whole)
        is_whole = self._is_behind or is_large or not (running or ended)
        if is_whole:
            self._written.clear()
            changed = ended
        entries = self._entries(running, ended, changed)
        if not entries and not (is_whole and self._file.num_bytes):
            return
        frame = msgspec.msgpack.encode(entries) if entries else b""
        try:
            await asyncio.to_thread(self._file.replace if is_whole else self._file.append, frame)
        except OSError as error:
            if not self._is_failing:
                log.error(
                    "unacknowledged_usage_not_written",
                    error=str(error),
                    advice="check the free space and the permissions of the data directory",
                )
            self._is_behind = self._is_failing = True
            return
        if is_whole:
            self._num_bytes_whole = self._file.num_bytes
        self._is_behind = self._is_failing = False

    def close(self) -> None:
        self._file.close()

    def _entries(
        self, running: Mapping[Key, Running], ended: Mapping[Key, MeteredUsage], changed: Iterable[Key]
    ) -> list[_Entry]:
        entries: list[_Entry] = []
        for key, request in running.items():
            counts = request.num_cached_tokens, request.num_output
            written = self._written.get(key)
            if written is None:
                entries.append(self._note(key, request.metered(key[0])))
            elif written[1:] != counts:
                entries.append(self._count(key, written[0], *counts))
        for key in changed:
            record, written = ended.get(key), self._written.get(key)
            if key in running:
                continue  # the request was resumed after it had ended
            if record is None:
                if written is not None:
                    del self._written[key]
                    entries.append(_AcknowledgedEntry(written[0]))
            elif written is None:
                entries.append(self._note(key, record))
            else:
                entries.append(self._count(key, written[0], record.num_cached_tokens, record.num_output_tokens))
        return entries

    def _note(self, key: Key, record: MeteredUsage) -> _Noted:
        self._num_noted += 1
        self._written[key] = self._num_noted, record.num_cached_tokens, record.num_output_tokens
        return _Noted(self._num_noted, record)

    def _count(self, key: Key, number: int, num_cached: int, num_output: int) -> _Counted:
        self._written[key] = number, num_cached, num_output
        return _Counted(number, num_cached, num_output)


def _replay(found: dict[int, MeteredUsage], entry: _Entry) -> None:
    if isinstance(entry, _Noted):
        found[entry.number] = entry.record
    elif isinstance(entry, _AcknowledgedEntry):
        found.pop(entry.number, None)
    elif entry.number in found:
        found[entry.number] = msgspec.structs.replace(
            found[entry.number],
            num_cached_tokens=entry.num_cached_tokens,
            num_output_tokens=entry.num_output_tokens,
        )
