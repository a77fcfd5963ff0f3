"""Disk cache of one rank group: its files, their index, their saver and their restorer."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import structlog

from moiety_engine.disk.index import DiskIndex, Stored
from moiety_engine.disk.records import Kept
from moiety_engine.disk.restoring import Restorer
from moiety_engine.disk.rows import Rows
from moiety_engine.disk.saving import Saver

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_engine.disk.folder import Folder
    from moiety_engine.scheduling.kv.kv_ledger import KvLedger
    from moiety_engine.scheduling.kv.prefix_search import PrefixHits
    from moiety_engine.sequence import Sequence

SCAN_WAIT_S = 2.0  # time that a start waits for the scan; later finds are added while serving

log = structlog.get_logger()


class FoundPrefix(NamedTuple):
    """Blocks of a prompt that a group has. `wanted` are the hashes that its disk has and its device has not."""

    hits: PrefixHits
    num_blocks: int  # on the device, in host memory and on disk, without a gap
    wanted: list[bytes]

    @property
    def num_restorable(self) -> int:
        """Blocks that only the disk or the host memory has."""
        return self.num_blocks - len(self.hits)


class GroupCache:
    """Disk cache of a rank group. Used by the step loop's thread, except for its own threads."""

    def __init__(self, folder: Folder, ledger: KvLedger, max_bytes: int) -> None:
        self.folder, self.ledger = folder, ledger
        self.index = DiskIndex(max_bytes)
        self.saver = Saver(folder, self.index, ledger.pool.num_blocks)
        self.restorer = Restorer(folder, self.index, max(4, min(8, (os.cpu_count() or 1) // 2)))
        self.rows_out: Rows | None = None
        self.rows_in: Rows | None = None
        self._found: deque[Stored] = deque()
        self._scanning = threading.Thread(target=self._scan, name="disk-scan", daemon=True)
        self._scanning.start()
        ledger.on_release = self._released

    @property
    def is_quiet(self) -> bool:
        """Return whether no read or write is in progress."""
        return self.saver.is_quiet and self.restorer.is_quiet

    def wait_for_scan(self, timeout_s: float) -> None:
        """Wait until the existing files are known, and add them to the index."""
        self._scanning.join(timeout_s)
        self.take_found()

    def take_found(self) -> None:
        """Add the files to the index that the scan has found by now."""
        while self._found:
            stored = self._found.popleft()
            self.saver.remove(self.index.add(stored))
            self.index.keep(stored, stored.kept, time.time())

    def detach(self) -> None:
        """Forget the cache's blocks and rows."""
        self.saver.forget()
        self.saver.release_rows()
        self.restorer.forget()
        self.rows_out = self.rows_in = None

    def close(self) -> None:
        """End the threads, and unlock the folder."""
        self.ledger.on_release = None
        self.saver.close()
        self.restorer.close()
        self.folder.close()

    def find_prefix(self, probe: Sequence) -> FoundPrefix:
        """Return the blocks of a prompt on the device and those that could follow them."""
        ledger = self.ledger
        hits = ledger.find_prefix(probe)
        end = len(hits)
        while (block_hash := ledger.next_hash(probe, end)) is not None:
            if not ledger.holds(block_hash) and self.index.find(block_hash) is None:
                break
            end += 1
        # includes blocks in host memory: restored blocks may evict them there
        hashes = [probe.block_hashes.at(place, ledger.block_size) for place in range(end)] if end > len(hits) else []
        wanted = [one for one in hashes if ledger.pool.find(one) is None and self.index.find(one) is not None]
        return FoundPrefix(hits, end, wanted)

    def restore(self, copy_evicted: Callable[[], None]) -> None:
        """Copy what was read into free blocks, and start further reads.

        `copy_evicted` runs the ledgers' queued copies, so that the old contents of the blocks are elsewhere.
        """
        assert self.rows_in is not None, "blocks are restored without rows"
        for portion in self.restorer.take_read():
            adopted = self.ledger.adopt(portion.hashes)
            copy_evicted()
            named = zip(portion.hashes, portion.taken, strict=True)
            pairs = [(row, adopted[one]) for one, row in named if one in adopted]
            portion.rows.copy_in(pairs, portion.taken)
            self.ledger.adopted(adopted)
            self.restorer.record_restored(len(pairs), len(pairs) * self.folder.block_bytes)
        self.restorer.read(self.rows_in)

    def _released(self, sequence: Sequence) -> None:
        hashes = sequence.block_hashes.between(0, sequence.kv.num_sealed, self.ledger.block_size)
        submit = sequence.request.submit
        kept = Kept(time.time() + submit.keep_s, submit.tenant_weight) if submit.keep_s > 0 else None
        self.saver.offer(submit.tenant_id, hashes, kept)

    def _scan(self) -> None:
        begin_s, num_files = time.monotonic(), 0
        try:
            for stored in self.folder.scan():
                self._found.append(stored)
                num_files += 1
        except OSError as exc:
            log.warning(
                "disk_cache_unreadable",
                reason=exc.strerror or str(exc),
                advice="check the permissions of the folder of --disk-cache; requests are served without it",
            )
        log.info("disk_cache_scanned", num_files=num_files, duration_s=round(time.monotonic() - begin_s, 3))
