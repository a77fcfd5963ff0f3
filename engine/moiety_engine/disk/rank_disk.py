"""A rank's part of the disk tier on a rank other than rank 0: its folder, its rows, and the threads that fill both.

Rank 0 decides what is written, read and deleted (`disk/rank_files.py`).
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from moiety_engine.disk.folder import DiskFolder
from moiety_engine.disk.identity import digest_of_rank, identity_of
from moiety_engine.disk.rank_files import (
    FileAnswer,
    FileEntry,
    FileRequest,
    ListFiles,
    ReadFile,
    RemoveFile,
    RemoveTenants,
    RowsRef,
    TouchFile,
    WriteFile,
)
from moiety_engine.disk.rows import host_rows
from moiety_engine.distribution.rank_requests import RankAnswers, exchange_over_store
from moiety_engine.errors import OutOfMemory
from moiety_engine.runner.kv_swap import CopyMark, HostKv

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_engine.config import EngineConfig
    from moiety_engine.disk.records import Buffer
    from moiety_engine.distribution.rank_group import RankGroup
    from moiety_engine.model.batch import KvCache
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.runner.control_messages import CopyDiskRows, OpenDiskRows

_NUM_READERS = 4
_IDENTITIES = "disk-identity"  # store key
_IDENTIFY_S = 1800.0  # longest wait for another rank, which may read a large checkpoint for the first time

log = structlog.get_logger()


def identities(config: EngineConfig, model: Transformer, rank_group: RankGroup, kv: KvCache, key: bytes) -> bytes:
    """Return the identity of this rank's KV. All ranks with layers must call this at the same point.

    Raises OSError if a rank cannot read its checkpoint.
    """
    position = rank_group.ranks.rank_position
    digest = partial(digest_of_rank, model, config, kv, Path(config.disk_cache))
    ranks = range(position.layout.attention_ranks)
    digests = exchange_over_store(rank_group.store, key, _IDENTITIES, position.rank, ranks, digest, _IDENTIFY_S)
    return identity_of(digests, position.rank)


class _LocalRows:
    """Rows of this rank. The step loop's thread copies; other threads wait for its copies."""

    def __init__(self, host: HostKv) -> None:
        self.host = host
        self._changed = threading.Condition()
        self._num_copies, self._mark, self._is_released = 0, CopyMark(None), False

    def copy(self, outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> None:
        self.host.run(outs, ins)
        with self._changed:
            self._num_copies += 1
            self._mark = self.host.mark()
            self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            self._is_released = True
            self._changed.notify_all()

    def wait(self, num_copies: int) -> bool:
        """Wait until the rows have been copied this many times. Return False if they are released before."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_copies >= num_copies or self._is_released)
            is_copied, mark = self._num_copies >= num_copies, self._mark
        mark.wait()
        return is_copied


class RankDiskCache:
    """Part of the disk tier of one rank. The methods are called by the thread that executes control messages."""

    def __init__(self, config: EngineConfig, model: Transformer, rank_group: RankGroup) -> None:
        self._config, self._model, self._rank_group = config, model, rank_group
        self._folder: DiskFolder | None = None
        self._answers: RankAnswers | None = None
        self._rows: dict[int, _LocalRows] = {}
        self._decoder: msgspec.msgpack.Decoder[FileRequest] = msgspec.msgpack.Decoder(FileRequest)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="disk-writer")
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="disk-reader")

    def open_rows(self, message: OpenDiskRows, kv: KvCache) -> None:
        """Allocate the rows, after opening the folder the first time. Raises OutOfMemory, InvalidConfig."""
        if self._folder is None:
            identity = identities(self._config, self._model, self._rank_group, kv, message.key)
            self._folder = DiskFolder(Path(self._config.disk_cache), identity, HostKv.bytes_of_a_block(kv))
            rank = self._rank_group.ranks.rank_position.rank
            self._answers = RankAnswers(self._rank_group.store, message.key, rank, self._handle)
        try:
            self._rows = {one: _LocalRows(host_rows(kv, message.count)) for one in message.rows_ids}
        except RuntimeError as exc:  # the type that torch raises
            raise OutOfMemory("the host has too little memory for the disk cache's buffers") from exc

    def copy(self, message: CopyDiskRows) -> None:
        """Copy blocks between the cache and rows."""
        self._rows[message.rows_id].copy(message.outs, message.ins)

    def release(self) -> None:
        """Release the rows, because the cache is released."""
        for rows in self._rows.values():
            rows.release()
        self._rows = {}

    def close(self) -> None:
        """End the threads and unlock the folder."""
        self.release()
        if self._answers is not None:
            self._answers.close()
        self._writer.shutdown()
        self._readers.shutdown()
        if self._folder is not None:
            self._folder.close()

    def _handle(self, message: bytes) -> tuple[ThreadPoolExecutor, Callable[[], bytes]]:
        request = self._decoder.decode(message)
        assert self._folder is not None, "requests are answered without a folder"
        folder = self._folder

        def work() -> bytes:
            try:
                answer = self._answer(folder, request)
            except Exception as exc:  # the root of a task: the cache is lost, not the answer
                if not isinstance(exc, OSError):
                    log.exception("disk_request_failed")
                answer = FileAnswer(getattr(exc, "strerror", None) or str(exc) or type(exc).__name__)
            return msgspec.msgpack.encode(answer)

        return self._writer if isinstance(request, WriteFile | RemoveTenants) else self._readers, work

    def _answer(self, folder: DiskFolder, request: FileRequest) -> FileAnswer:
        match request:
            case WriteFile():
                views = self._views(request.rows)
                stored = folder.write(request.owner, request.hashes, views, request.kept, request.name)
                return FileAnswer(count=stored.num_bytes)
            case ReadFile():
                views = self._views(request.rows)
                outcome = folder.read(request.name, list(zip(request.hashes, views, strict=True)))
                return FileAnswer(outcome=outcome)
            case TouchFile():
                folder.touch(request.name) if request.kept is None else folder.keep(request.name, request.kept)
            case RemoveFile():
                folder.remove(request.name)
            case RemoveTenants():
                return FileAnswer(count=folder.remove_of(request.tenant_ids))
            case ListFiles():
                files = [
                    FileEntry(one.name, one.num_bytes, one.hashes, one.owner, one.used_s, one.kept)
                    for one in folder.scan(is_old_only=True)
                ]
                return FileAnswer(files=files)
        return FileAnswer()

    def _views(self, rows: RowsRef) -> list[Buffer]:
        here = self._rows.get(rows.rows_id)
        if here is None or not here.wait(rows.num_copies):
            raise OSError("the engine sleeps, and its blocks are gone")
        return [here.host.view(row) for row in rows.rows]
