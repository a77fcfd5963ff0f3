"""Files of a rank group: each rank writes and reads its own part of the blocks, under the same name in its own folder.

A file exists only where every rank of the group has it. The messages are sent from threads of rank 0 to threads of the
other ranks (`distribution/rank_requests.py`); only the copies between the caches and the rows are control messages.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from moiety_engine.disk.folder import DiskFolder, ReadOutcome, new_name
from moiety_engine.disk.index import Stored
from moiety_engine.disk.records import Kept
from moiety_engine.distribution.rank_requests import RequestTimedOut

if TYPE_CHECKING:
    from moiety_engine.disk.rows import RankRow
    from moiety_engine.distribution.rank_requests import RankRequests

Result = TypeVar("Result")


class RowsRef(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a rank, valid after the rows `rows_id` have been copied `num_copies` times."""

    rows_id: int
    num_copies: int
    rows: list[int]


class WriteFile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write the rows as the blocks of a new file."""

    name: str
    owner: bytes
    hashes: list[bytes]
    rows: RowsRef
    kept: Kept | None


class ReadFile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fill the rows with blocks of a file."""

    name: str
    hashes: list[bytes]
    rows: RowsRef


class TouchFile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Mark a file as used now and, if `kept` is set, as retained."""

    name: str
    kept: Kept | None = None


class RemoveFile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Delete a file."""

    name: str


class RemoveTenants(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Delete the tenants' files of other identities."""

    tenant_ids: list[str]


class ListFiles(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """List the files from before the folder was opened."""


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """A file as a rank lists it: the fields of Stored."""

    name: str
    num_bytes: int
    hashes: tuple[bytes, ...]
    owner: bytes
    used_s: float
    kept: Kept | None


class FileAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Answer to each request. `error` is "" where it succeeded; `count`: bytes written, or files deleted.

    `outcome` is that of ReadFile.
    """

    error: str = ""
    count: int = 0
    files: list[FileEntry] = []
    outcome: ReadOutcome = ReadOutcome.NOT_AVAILABLE


FileRequest = WriteFile | ReadFile | TouchFile | RemoveFile | RemoveTenants | ListFiles


class GroupFolder:
    """Rank 0's view of a group's files. Any thread may call everything except closing.

    It takes the place of a DiskFolder. `own` is the folder of rank 0, if it is one of the group's ranks; `others` are
    the group's other ranks.
    """

    def __init__(
        self,
        own: DiskFolder | None,
        parent: Path,
        identity: bytes,
        block_bytes: int,
        others: Sequence[int],
        requests: RankRequests,
    ) -> None:
        self.identity, self.block_bytes = identity, block_bytes
        self.path = parent if own is None else own.path
        self._own, self._others, self._requests = own, others, requests
        self._encoder: Callable[[FileRequest], bytes] = msgspec.msgpack.encode
        self._decoder = msgspec.msgpack.Decoder(FileAnswer)

    def write(
        self, owner: bytes, hashes: Sequence[bytes], blocks: Sequence[RankRow], kept: Kept | None = None
    ) -> Stored:
        """Write a new file on all ranks. Raises OSError, and then leaves nothing behind.

        After RequestTimedOut another rank may still read the rows, and leave its part of the file until the next scan.
        """
        name, own = new_name(), self._own
        views = [block.own for block in blocks if block.own is not None]
        message = WriteFile(name, owner, list(hashes), _rows_of(blocks), kept)
        stored, answers, problem = self._on_all_ranks(
            message, None if own is None else lambda: own.write(owner, hashes, views, kept, name)
        )
        failed = [f"rank {rank}: {answer.error}" for rank, answer in answers.items() if answer.error]
        if problem is not None or failed:
            self.remove(name)
            raise problem or OSError(errno.EIO, failed[0])
        sizes = [answer.count for answer in answers.values()] + ([] if stored is None else [stored.num_bytes])
        return Stored(name, max(sizes), tuple(hashes), owner, time.time(), kept)

    def read(self, name: str, wanted: Sequence[tuple[bytes, RankRow]]) -> ReadOutcome:
        """Fill each row on all ranks with the block of its hash.

        A file that is gone or bad on a rank is removed on all. A file is left as it is if a rank cannot say: it has
        no rows any more, has not answered in time, or ends.
        """
        own, rows = self._own, [row for _, row in wanted]
        views = [(block_hash, row.own) for block_hash, row in wanted if row.own is not None]
        message = ReadFile(name, [block_hash for block_hash, _ in wanted], _rows_of(rows))
        of_own, answers, problem = self._on_all_ranks(message, None if own is None else lambda: own.read(name, views))
        outcomes = {answer.outcome for answer in answers.values()} | ({of_own} if of_own is not None else set())
        if problem is not None:
            return ReadOutcome.NOT_AVAILABLE
        if ReadOutcome.FILE_IS_BAD in outcomes:
            self.remove(name)
            return ReadOutcome.FILE_IS_BAD
        return ReadOutcome.NOT_AVAILABLE if ReadOutcome.NOT_AVAILABLE in outcomes else ReadOutcome.DONE

    def scan(self) -> Iterator[Stored]:
        """Yield the files that all ranks of the group have; remove those that some do not have."""
        own = self._own
        found, answers, problem = self._on_all_ranks(
            ListFiles(), None if own is None else lambda: list(own.scan(is_old_only=True))
        )
        errors = [answer.error for answer in answers.values() if answer.error]
        if problem is not None or errors:
            raise problem or OSError(errno.EIO, errors[0])
        listed = [{one.name: one for one in answer.files} for answer in answers.values()]
        if own is not None:
            listed.append({one.name: _entry(one) for one in found or ()})
        everywhere = set(listed[0]).intersection(*listed[1:])
        everywhere = {name for name in everywhere if all(one[name].hashes == listed[0][name].hashes for one in listed)}
        for name in set().union(*listed) - everywhere:
            self.remove(name)
        for name in sorted(everywhere, key=lambda name: listed[0][name].used_s):
            entry, num_bytes = listed[0][name], max(one[name].num_bytes for one in listed)
            yield Stored(name, num_bytes, entry.hashes, entry.owner, entry.used_s, entry.kept)

    def remove_of(self, tenant_ids: Collection[str]) -> int:
        """Remove these tenants' files from the folders of other identities; return the number of files."""
        own = self._own
        count, answers, problem = self._on_all_ranks(
            RemoveTenants(list(tenant_ids)), None if own is None else lambda: own.remove_of(tenant_ids)
        )
        errors = [answer.error for answer in answers.values() if answer.error]
        if problem is not None or errors:
            raise problem or OSError(errno.EIO, errors[0])
        return (count or 0) + sum(answer.count for answer in answers.values())

    def touch(self, name: str) -> None:
        """Mark the file as used now, also for later engines."""
        own = self._own
        self._on_all_ranks(TouchFile(name), None if own is None else lambda: own.touch(name))

    def keep(self, name: str, kept: Kept) -> None:
        """Mark the file as used now and retained, also for later engines."""
        own = self._own
        self._on_all_ranks(TouchFile(name, kept), None if own is None else lambda: own.keep(name, kept))

    def remove(self, name: str) -> None:
        """Remove the file on all ranks that have it."""
        own = self._own
        self._on_all_ranks(RemoveFile(name), None if own is None else lambda: own.remove(name))

    def close(self) -> None:
        if self._own is not None:
            self._own.close()

    def _on_all_ranks(
        self, message: FileRequest, on_own: Callable[[], Result] | None
    ) -> tuple[Result | None, dict[int, FileAnswer], OSError | None]:
        """Run an operation on all ranks and wait for all: their rows are in use until then.

        Returns this rank's result, the answers of the others, and an OSError of this rank or of the connections:
        RequestTimedOut if another rank may still use its rows.
        """
        result, encoded = None, self._encoder(message)
        answers: dict[int, FileAnswer] = {}
        problems: list[OSError] = []
        try:
            sent = {rank: self._requests.send(rank, encoded) for rank in self._others}
        except OSError as exc:  # the store is gone, and with it the engine
            return None, answers, exc
        try:
            result = None if on_own is None else on_own()
        except OSError as exc:
            problems.append(exc)
        for rank, number in sent.items():
            try:
                answers[rank] = self._decoder.decode(self._requests.answer(rank, number))
            except OSError as exc:
                problems.append(exc)
        late = [problem for problem in problems if isinstance(problem, RequestTimedOut)]
        return result, answers, (*late, *problems, None)[0]


def _rows_of(rows: Sequence[RankRow]) -> RowsRef:
    first = rows[0]
    return RowsRef(first.rows_id, first.num_copies, [one.row for one in rows])


def _entry(one: Stored) -> FileEntry:
    return FileEntry(one.name, one.num_bytes, one.hashes, one.owner, one.used_s, one.kept)
