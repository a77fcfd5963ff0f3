"""Restore of blocks from disk to the device while the request that needs them waits among the pending requests.

A request waits only where reading is predicted to take less time than computing, by recent times of both, and not much
longer than computing would have taken. Restored blocks become part of the prefix cache, as if they had never left the
device, and the waiting request finds them there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moiety_engine.disk.folder import ReadOutcome

if TYPE_CHECKING:
    from moiety_engine.disk.folder import Folder
    from moiety_engine.disk.index import DiskIndex, Stored
    from moiety_engine.disk.rows import Rows
    from moiety_engine.messages import CoreSubmit
    from moiety_engine.structured_outputs.stepping import GrammarHandle

EXTRA_WAIT_S = 0.25  # beyond the predicted compute time
FIRST_EXTRA_WAIT_S = 5.0  # used until the compute time is known
PORTION_BYTES = 8 << 20  # bytes per read
_FORGET = 0.8  # decay of the read statistics, per request
_READ_TIME_DECAY = 0.98  # decay of the read time, per request that did not wait: a slow disk is tried again
_GUESS_BYTES, _GUESS_S = 64 << 20, 0.1


class ReadingRate:
    """Reading rate, averaged over requests and weighted by bytes."""

    def __init__(self) -> None:
        self._bytes, self._seconds = float(_GUESS_BYTES), _GUESS_S

    def predict_s(self, num_bytes: int) -> float:
        return num_bytes * self._seconds / self._bytes

    def observe(self, num_bytes: int, seconds: float) -> None:
        self._bytes = self._bytes * _FORGET + num_bytes
        self._seconds = self._seconds * _FORGET + seconds

    def decay(self) -> None:
        self._seconds *= _READ_TIME_DECAY


@dataclass(slots=True)
class _PendingRestore:
    submit: CoreSubmit
    grammar: GrammarHandle | None
    wanted: deque[bytes]  # not yet being read, in order
    since_s: float
    until_s: float
    last_s: float  # deadline if half of the blocks have arrived by `until_s`
    num_wanted: int
    bytes_before: int  # bytes restored for any request when it arrived
    reading: set[Future[ReadOutcome]] = field(default_factory=set)


@dataclass(slots=True)
class _Portion:
    """Part of a file that is being read into rows."""

    stored: Stored
    hashes: list[bytes]
    rows: Rows
    taken: list[int]


class Restorer:
    """Restorer of blocks, used by the step loop's thread except for its readers."""

    def __init__(
        self, folder: Folder, index: DiskIndex, num_readers: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._index, self._clock = folder, index, clock
        self._pending: dict[int, _PendingRestore] = {}
        self._portions: dict[Future[ReadOutcome], _Portion] = {}
        self._read_by: dict[bytes, Future[ReadOutcome]] = {}
        self._readers = ThreadPoolExecutor(num_readers, thread_name_prefix="disk-reader")
        self.rate = ReadingRate()
        self.restored_blocks_total = self.restored_bytes_total = self.lost_files_total = 0
        self.waited_requests_total = self.passed_over_total = 0

    @property
    def num_waiting(self) -> int:
        return len(self._pending)

    @property
    def is_quiet(self) -> bool:
        return not self._pending and not self._portions

    def add_request(
        self,
        submit: CoreSubmit,
        grammar: GrammarHandle | None,
        wanted: list[bytes],
        compute_s: float,
        block_bytes: int,
        *,
        is_known: bool,
    ) -> bool:
        """Make a request wait for its blocks; return False where computing them is predicted to be faster.

        `compute_s`: predicted time to compute them. `is_known`: whether that is more than a guess.
        """
        num_ahead = sum(len(pending.wanted) for pending in self._pending.values()) + len(self._read_by)
        if self.rate.predict_s((len(wanted) + num_ahead) * block_bytes) >= compute_s:
            self.passed_over_total += 1
            self.rate.decay()
            return False
        now_s = self._clock()
        until_s = now_s + compute_s + (EXTRA_WAIT_S if is_known else FIRST_EXTRA_WAIT_S)
        self._pending[submit.key] = _PendingRestore(
            submit,
            grammar,
            deque(wanted),
            since_s=now_s,
            until_s=until_s,
            last_s=until_s + compute_s,
            num_wanted=len(wanted),
            bytes_before=self.restored_bytes_total,
        )
        self.waited_requests_total += 1
        return True

    def remove_request(self, key: int) -> CoreSubmit | None:
        """Remove a waiting request; None if there is none. Its reads are still restored."""
        pending = self._pending.pop(key, None)
        return None if pending is None else pending.submit

    def read(self, rows: Rows) -> None:
        """Start reads for the waiting requests, one portion each in turn, as long as rows are free."""
        most = max(1, min(PORTION_BYTES // rows.block_bytes, rows.count // 2))
        waiting = [pending for pending in self._pending.values() if pending.wanted]
        while waiting and rows.num_free:
            waiting = [pending for pending in waiting if rows.num_free and self._read_for(pending, rows, most)]

    def take_read(self) -> Iterator[_Portion]:
        """Yield the portions read since the last call that are valid.

        The caller copies them to the device and then calls `record_restored`.
        """
        for future in [future for future in self._portions if future.done()]:
            portion = self._portions.pop(future)
            for block_hash in portion.hashes:
                self._read_by.pop(block_hash, None)
            outcome = future.result()
            is_good = outcome is ReadOutcome.DONE
            for pending in self._pending.values():
                if future in pending.reading:
                    pending.reading.discard(future)
                    if not is_good:
                        pending.wanted.clear()  # later blocks are useless without it
            if is_good:
                self._index.use(portion.stored, time.time())
                yield portion
            elif outcome is ReadOutcome.FILE_IS_BAD:
                portion.rows.release(portion.taken)
                self._index.drop(portion.stored)
                self.lost_files_total += 1
            # otherwise the rows stay taken, because a rank may still fill them, and the file stays known

    def expects(self, hashes: list[bytes]) -> bool:
        """Return whether any of these is being read, or the last one is still to be read for a waiting request."""
        wanted = any(hashes[-1] in pending.wanted for pending in self._pending.values())
        return wanted or any(one in self._read_by for one in hashes)

    def expected_keys(self) -> set[bytes]:
        """Return the hashes that are being read or are still to be read for waiting requests."""
        return self._read_by.keys() | {one for pending in self._pending.values() for one in pending.wanted}

    def record_restored(self, num_blocks: int, num_bytes: int) -> None:
        self.restored_blocks_total += num_blocks
        self.restored_bytes_total += num_bytes

    def take_ready(self) -> Iterator[tuple[CoreSubmit, GrammarHandle | None]]:
        """Yield the requests that need not wait any longer, or that waited as long as computing would have taken."""
        now_s = self._clock()
        for key, pending in list(self._pending.items()):
            half_is_there = 2 * len(pending.wanted) < pending.num_wanted
            if (pending.wanted or pending.reading) and now_s < (pending.last_s if half_is_there else pending.until_s):
                continue
            del self._pending[key]
            self.rate.observe(self.restored_bytes_total - pending.bytes_before, now_s - pending.since_s)
            yield pending.submit, pending.grammar

    def forget(self) -> None:
        """Forget the reads in progress after the device's cache is gone."""
        assert not self._pending, "a replica sleeps while requests wait"
        self._portions.clear()
        self._read_by.clear()

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _read_for(self, pending: _PendingRestore, rows: Rows, most: int) -> bool:
        """Start the next read for a waiting request. Returns whether more remains."""
        hashes: list[bytes] = []
        stored = None
        while pending.wanted and len(hashes) < min(most, rows.num_free):
            block_hash = pending.wanted[0]
            other = self._read_by.get(block_hash)
            found = self._index.find(block_hash)
            if other is not None:
                pending.reading.add(other)
            elif found is None:
                pending.wanted.clear()
                break
            elif stored in (None, found):
                stored = found
                hashes.append(block_hash)
            else:
                break
            pending.wanted.popleft()
        if stored is not None:
            self._start(pending, stored, hashes, rows)
        return bool(pending.wanted)

    def _start(self, pending: _PendingRestore, stored: Stored, hashes: list[bytes], rows: Rows) -> None:
        taken = rows.take(len(hashes))
        wanted = [(one, rows.view(row)) for one, row in zip(hashes, taken, strict=True)]

        def read() -> ReadOutcome:
            outcome = self._folder.read(stored.name, wanted)
            if outcome is ReadOutcome.DONE:
                self._folder.touch(stored.name)
            return outcome

        future = self._readers.submit(read)
        self._portions[future] = _Portion(stored, hashes, rows, taken)
        self._read_by.update(dict.fromkeys(hashes, future))
        pending.reading.add(future)
