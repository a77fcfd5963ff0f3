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
from moiety_engine.disk.state_rows import StateRestores, piece_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

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

    def __init__(self, folder: Folder, ledger: KvLedger, max_bytes: int, num_state_pieces: int = 0) -> None:
        """Create the cache. `num_state_pieces`: rows that a recurrent state takes; 0 without recurrent layers."""
        self.folder, self.ledger = folder, ledger
        self.index = DiskIndex(max_bytes)
        num_blocks, states = ledger.pool.num_blocks, ledger.states
        self.states = None if states is None else StateRestores(states, num_blocks, num_state_pieces)
        num_pieces = 0 if states is None else states.num_slots * num_state_pieces
        self.saver = Saver(folder, self.index, num_blocks + num_pieces)
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
        if self.states is not None:
            self.states.forget()
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
        if self.states is not None:
            return self._find_with_state(probe, hits, end, self.states)
        # includes blocks in host memory: restored blocks may evict them there
        hashes = [probe.block_hashes.at(place, ledger.block_size) for place in range(end)] if end > len(hits) else []
        wanted = [one for one in hashes if ledger.pool.find(one) is None and self.index.find(one) is not None]
        return FoundPrefix(hits, end, wanted)

    def _find_with_state(self, probe: Sequence, hits: PrefixHits, end: int, states: StateRestores) -> FoundPrefix:
        """Return the longest prefix of at most `end` blocks after whose last one a state is known."""
        ledger = self.ledger
        assert ledger.states is not None
        hashes = [probe.block_hashes.at(place, ledger.block_size) for place in range(end)]
        while end > len(hits):
            on_device = ledger.states.has_snapshot(hashes[end - 1])
            if on_device or states.is_stored(hashes[end - 1], self.index):
                wanted = [
                    one for one in hashes[:end] if ledger.pool.find(one) is None and self.index.find(one) is not None
                ]
                return FoundPrefix(hits, end, wanted if on_device else wanted + states.note(hashes[end - 1]))
            end -= 1
        return FoundPrefix(hits, len(hits), [])

    def save(self, most_bytes: int) -> None:
        """Copy out offered blocks and states, and start their writes."""
        if not self.saver.is_quiet and self.rows_out is not None:
            self.saver.save(self._find_on_device, self.rows_out, most_bytes)

    def forget_unused_keys(self) -> None:
        """Forget the keys of states that are neither written nor read any more."""
        if self.states is not None:
            self.states.forget_unused_keys(lambda: self.saver.known_keys() | self.restorer.expected_keys())

    def _find_on_device(self, key: bytes) -> int | None:
        block = self.ledger.pool.find(key)
        return block if block is not None or self.states is None else self.states.find(key)

    def restore(self, copy_evicted: Callable[[], None]) -> None:
        """Copy what was read into free blocks, and start further reads.

        `copy_evicted` runs the ledgers' queued copies, so that the old contents of the blocks are elsewhere.
        """
        assert self.rows_in is not None, "blocks are restored without rows"
        for portion in self.restorer.take_read():
            pieces = {key: number for key in portion.hashes if (number := self._place_state(key)) is not None}
            of_blocks = [one for one in portion.hashes if one not in pieces and not self._is_piece(one)]
            adopted = self.ledger.adopt(of_blocks)
            copy_evicted()
            named = zip(portion.hashes, portion.taken, strict=True)
            places = adopted | pieces
            pairs = [(row, places[one]) for one, row in named if one in places]
            portion.rows.copy_in(pairs, portion.taken)
            self.ledger.adopted(adopted)
            self.restorer.record_restored(len(pairs), len(pairs) * self.folder.block_bytes)
        self.restorer.read(self.rows_in)
        if self.states is not None:
            self.states.end_filled(self.restorer.expects)

    def _place_state(self, key: bytes) -> int | None:
        return None if self.states is None or self.ledger.is_forgotten(key) else self.states.place(key)

    def _is_piece(self, key: bytes) -> bool:
        return self.states is not None and self.states.is_piece(key)

    def invalidate(self, hashes: Collection[bytes]) -> None:
        """Prevent blocks with these hashes, and the states after them, from being restored or written."""
        keys, states = list(hashes), self.states
        if states is not None:
            written = [one for one in hashes if states.is_written(one, self.index)]
            keys += [key for one in written for key in piece_keys(one, states.num_pieces)]
        self.saver.invalidate(keys)

    def _released(self, sequence: Sequence) -> None:
        hashes = sequence.block_hashes.between(0, sequence.kv.num_sealed, self.ledger.block_size)
        submit = sequence.request.submit
        kept = Kept(time.time() + submit.keep_s, submit.tenant_weight) if submit.keep_s > 0 else None
        if self.states is not None:
            hashes += self.states.keys_of(hashes)
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
