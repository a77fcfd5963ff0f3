"""Writes of released blocks from the device to the disk: copied out before the next step, written by a thread.

A block is written once, soon after the first request that has it releases it, instead of at eviction: the number of
writes is the same, and at a restart the blocks are already on disk. Where the disk is slower than blocks arrive, blocks
that are evicted before their turn are dropped and counted.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from moiety_engine.disk.records import owner_tag
from moiety_engine.distribution.rank_requests import RequestTimedOut

if TYPE_CHECKING:
    from moiety_engine.disk.folder import Folder
    from moiety_engine.disk.index import DiskIndex, Stored
    from moiety_engine.disk.records import Kept
    from moiety_engine.disk.rows import Rows

PAUSE_S = 60.0  # without writes after the disk was full or failed
MAX_IN_A_FILE = 512  # blocks
FILE_BYTES = 8 << 20
TURN_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}  # bytes copied out before one step
TOUCH_INTERVAL_S = 60.0  # precision of the last-use times of files
_NICENESS = 10

log = structlog.get_logger()


@dataclass(slots=True)
class _Offer:
    """Blocks that one request released, in their order."""

    owner: bytes
    hashes: list[bytes]
    kept: Kept | None


@dataclass(slots=True)
class _Writing:
    future: Future[Stored]
    rows: Rows | None  # None: the cache has been detached meanwhile
    taken: list[int]
    hashes: list[bytes]
    is_valid: bool = True  # False: remove the file once it is written


class Saver:
    """Writer of released blocks, used by the step loop's thread except for its writer thread."""

    def __init__(
        self, folder: Folder, index: DiskIndex, most_waiting: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Create the saver. Beyond `most_waiting` blocks that wait for a write, the oldest are dropped."""
        self._folder, self._index, self._most_waiting, self._clock = folder, index, most_waiting, clock
        self._offers: deque[_Offer] = deque()
        self._known: set[bytes] = set()  # offered, or being written
        self._writing: deque[_Writing] = deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="disk-writer", initializer=_lower_priority)
        self._beside: deque[Future[None]] = deque()  # the writer's tasks other than writing files
        self._paused_until_s = 0.0
        self.written_blocks_total = self.written_bytes_total = 0
        self.dropped_blocks_total = self.failed_writes_total = 0

    @property
    def is_quiet(self) -> bool:
        return not self._offers and not self._writing and not self._beside

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    @property
    def is_paused(self) -> bool:
        return self._clock() < self._paused_until_s

    def known_keys(self) -> frozenset[bytes]:
        """Return the hashes that were offered or are being written."""
        return frozenset(self._known)

    def offer(self, tenant_id: str, hashes: list[bytes], kept: Kept | None = None) -> None:
        """Offer a request's released blocks, which are on the device, by their hashes."""
        now_s = self._clock()
        fresh, used = [], set()
        for block_hash in hashes:
            stored = self._index.find(block_hash)
            if stored is not None:
                used.add(stored)
            elif block_hash not in self._known:
                fresh.append(block_hash)
        for stored in used:
            self._index.keep(stored, kept, now_s)
            if kept is not None and kept.until_s > _until_s(stored.kept) + TOUCH_INTERVAL_S:
                stored.kept = kept
                self._beside.append(self._writer.submit(self._folder.keep, stored.name, kept))
            elif now_s - stored.used_s > TOUCH_INTERVAL_S:
                self._writer.submit(self._folder.touch, stored.name)
            self._index.use(stored, now_s)
        if not fresh:
            return
        if self.is_paused:
            self.dropped_blocks_total += len(fresh)
            return
        self._known.update(fresh)
        self._offers.append(_Offer(owner_tag(tenant_id, self._folder.identity), fresh, kept))
        while len(self._known) > self._most_waiting and len(self._offers) > 1:
            self._drop(self._offers.popleft())

    def save(self, find: Callable[[bytes], int | None], rows: Rows, most_bytes: int) -> None:
        """Copy out offered blocks, as far as rows and bytes allow, and start their writes.

        `find` returns the device block with a hash; None if the device has none any more.
        """
        left = most_bytes // rows.block_bytes or 1
        in_a_file = max(1, min(MAX_IN_A_FILE, FILE_BYTES // rows.block_bytes))
        while self._offers and left > 0 and (count := min(rows.num_free, left, in_a_file)):
            offer = self._offers[0]
            part, offer.hashes = offer.hashes[:count], offer.hashes[count:]
            if not offer.hashes:
                self._offers.popleft()
            there = [(one, block) for one in part if (block := find(one)) is not None]
            gone = set(part).difference(one for one, _ in there)
            self._known -= gone
            self.dropped_blocks_total += len(gone)
            if there:
                self._write(offer, there, rows)
                left -= len(there)

    def take_written(self) -> None:
        """Process the writes that ended since the last call."""
        while self._beside and self._beside[0].done():
            self._beside.popleft()
        while self._writing and self._writing[0].future.done():
            done = self._writing.popleft()
            problem = done.future.exception()
            if done.rows is not None and not isinstance(problem, RequestTimedOut):  # a rank may still read them
                done.rows.release(done.taken)
            self._known.difference_update(done.hashes)
            if problem is None:
                stored = done.future.result()
                self.written_blocks_total += len(stored.hashes)
                self.written_bytes_total += stored.num_bytes
                gone = self._index.add(stored) if done.is_valid else [stored]
                self._index.keep(stored, stored.kept, self._clock())
                self.remove(gone)
            elif isinstance(problem, FileNotFoundError) and self._folder.path.exists():
                self.dropped_blocks_total += len(done.hashes)  # a tenant deletion for another model removed it
            elif isinstance(problem, OSError):
                self.dropped_blocks_total += len(done.hashes)
                self._failed(problem)
            else:
                raise problem

    def remove(self, files: list[Stored]) -> None:
        """Delete files that the index has forgotten."""
        self._beside += [self._writer.submit(self._folder.remove, stored.name) for stored in files]

    def forget_tenants(self, tenant_ids: Collection[str]) -> int:
        """Delete the tenants' files and keep none in future; return the number of known files."""
        owners = {owner_tag(one, self._folder.identity) for one in tenant_ids}
        for offer in [offer for offer in self._offers if offer.owner in owners]:
            self._offers.remove(offer)
            self._known.difference_update(offer.hashes)
        gone = self._index.forget(owners)
        self.remove(gone)
        self._beside.append(self._writer.submit(self._remove_elsewhere, tenant_ids))
        return len(gone)

    def _remove_elsewhere(self, tenant_ids: Collection[str]) -> None:
        try:
            num_files = self._folder.remove_of(tenant_ids)
        except OSError as exc:
            log.warning(
                "disk_cache_files_not_deleted", reason=str(exc), advice="delete the files of other models by hand"
            )
        else:
            if num_files:
                log.info("disk_cache_files_deleted", num_files=num_files)

    def invalidate(self, hashes: Collection[bytes]) -> None:
        """Delete the files with any of these blocks, and cancel offers of these blocks."""
        bad = set(hashes)
        for offer in self._offers:
            self._known.difference_update(bad.intersection(offer.hashes))
            offer.hashes = [one for one in offer.hashes if one not in bad]
        self._offers = deque(offer for offer in self._offers if offer.hashes)
        for writing in self._writing:
            writing.is_valid = writing.is_valid and bad.isdisjoint(writing.hashes)
        files = {stored.name: stored for one in bad if (stored := self._index.find(one)) is not None}
        for stored in files.values():
            self._index.drop(stored)
        self.remove(list(files.values()))

    def forget(self) -> None:
        """Drop all offers after the cache's contents are lost: uncopied blocks no longer exist."""
        while self._offers:
            self._drop(self._offers.popleft())

    def release_rows(self) -> None:
        """Detach from the cache's rows: blocks being written are in host memory that only the writer now holds."""
        for one in self._writing:
            one.rows = None

    def wait(self, timeout_s: float) -> None:
        """Wait until the writer finishes one task."""
        under_way: list[Future[Any]] = [one.future for one in self._writing] or list(self._beside)
        if under_way:
            wait(under_way, timeout_s, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _write(self, offer: _Offer, there: list[tuple[bytes, int]], rows: Rows) -> None:
        taken = rows.take(len(there))
        mark = rows.copy_out([(block, row) for (_, block), row in zip(there, taken, strict=True)])
        hashes, owner = [one for one, _ in there], offer.owner
        views = [rows.view(row) for row in taken]

        def write() -> Stored:
            mark.wait()
            return self._folder.write(owner, hashes, views, offer.kept)

        self._writing.append(_Writing(self._writer.submit(write), rows, taken, hashes))

    def _drop(self, offer: _Offer) -> None:
        self._known.difference_update(offer.hashes)
        self.dropped_blocks_total += len(offer.hashes)

    def _failed(self, problem: OSError) -> None:
        self.failed_writes_total += 1
        if not self.is_paused:
            log.warning(
                "disk_cache_writes_paused",
                reason=problem.strerror or str(problem),
                seconds=PAUSE_S,
                advice="check the free space and the permissions of the folder of --disk-cache",
            )
        self._paused_until_s = self._clock() + PAUSE_S
        self.forget()


def _until_s(kept: Kept | None) -> float:
    return 0.0 if kept is None else kept.until_s


def _lower_priority() -> None:
    """Lower the writer thread's priority, where threads have their own niceness."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
