"""Disk tier of one replica, as the step loop uses it: its files, their saver and their restorer."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from moiety_engine.disk.folder import DiskFolder
from moiety_engine.disk.identity import digest_of_folder, identity_of
from moiety_engine.disk.index import DiskIndex, Stored
from moiety_engine.disk.records import Kept
from moiety_engine.disk.restoring import Restorer
from moiety_engine.disk.rows import Rows
from moiety_engine.disk.saving import TURN_BYTES, Saver
from moiety_engine.errors import InvalidConfig, OutOfMemory
from moiety_engine.runner.kv_swap import HostKv
from moiety_engine.scheduling.step_time.step_time_model import StepShape
from moiety_engine.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.cache.host import Copies
    from moiety_engine.config import EngineConfig
    from moiety_engine.messages import CoreSubmit
    from moiety_engine.model.batch import KvCache
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.scheduling.scheduler import Scheduler
    from moiety_engine.structured_outputs.stepping import GrammarHandle

ROW_BYTES = {"cuda": 128 << 20, "cpu": 32 << 20}  # of host memory, in each direction
SCAN_WAIT_S = 2.0  # time that a start waits for the scan; later finds are added while serving
FLUSH_S = 5.0  # time that a shutdown waits for unfinished writes
EXPIRY_INTERVAL_S = 10.0
KNOWN_STEPS = 16  # observed steps after which predictions are more than a guess

log = structlog.get_logger()


class DiskTier:
    """Disk tier, used by the step loop's thread. Raises InvalidConfig where the folder is not available."""

    def __init__(self, config: EngineConfig, model: Transformer, scheduler: Scheduler, kv: KvCache) -> None:
        self._scheduler, self._ledger = scheduler, scheduler.kv
        self._ttl_s = config.disk_cache_ttl_s
        parent, block_bytes = Path(config.disk_cache), HostKv.bytes_of_a_block(kv)
        if config.disk_cache_bytes < 2 * block_bytes:
            raise InvalidConfig(
                f"disk_cache_bytes ({config.disk_cache_bytes}) must be at least two blocks of {block_bytes} bytes"
            )
        self._kind = model.device.type
        self._adapters = {
            name: digest_of_folder(Path(folder), parent) for name, folder in sorted(config.adapters.items())
        }
        self.folder = DiskFolder(parent, identity_of(model, config, kv, parent), block_bytes)
        self.index = DiskIndex(config.disk_cache_bytes)
        self.saver = Saver(self.folder, self.index, self._ledger.pool.num_blocks)
        self.restorer = Restorer(self.folder, self.index, max(4, min(8, (os.cpu_count() or 1) // 2)))
        self._out: Rows | None = None
        self._in: Rows | None = None
        self._expires_s = 0.0
        self._found: deque[Stored] = deque()
        self._scanning = threading.Thread(target=self._scan, name="disk-scan", daemon=True)
        self._scanning.start()
        self._scanning.join(SCAN_WAIT_S)
        self._take_found()
        self._ledger.on_release = self._released
        self.serve(kv)

    @property
    def is_quiet(self) -> bool:
        """Return whether no read or write is in progress."""
        return self.saver.is_quiet and self.restorer.is_quiet

    def serve(self, kv: KvCache) -> None:
        """Attach the tier to this cache."""
        num_bytes = ROW_BYTES[self._kind]
        try:
            self._out, self._in = Rows(kv, num_bytes), Rows(kv, num_bytes)
        except RuntimeError as exc:  # the type that torch raises
            raise OutOfMemory(
                f"the host has too little memory for the disk cache's buffers of 2 × {num_bytes >> 20} MiB"
            ) from exc

    def detach(self, copy: Callable[[Copies], None]) -> None:
        """Write blocks for a few seconds at most, then detach the cache. Only while no request is open."""
        self._flush(copy)
        self.saver.forget()
        self.saver.release_rows()
        self.restorer.forget()
        self._out = self._in = None

    def _flush(self, copy: Callable[[Copies], None]) -> None:
        until_s = time.monotonic() + FLUSH_S
        while not self.saver.is_quiet and (left_s := until_s - time.monotonic()) > 0:
            self.run_copies(copy, most_bytes=ROW_BYTES[self._kind])
            self.saver.wait(left_s)

    def close(self, copy: Callable[[Copies], None] | None) -> None:
        """Close the tier. `copy`: None while there is no cache."""
        if copy is not None:
            self._flush(copy)
        self._ledger.on_release = None
        self.saver.close()
        self.restorer.close()
        self.folder.close()

    def salted(self, submit: CoreSubmit) -> bytes:
        """Return the request's salt, with the digest of an operator's adapter.

        After a restart, another adapter may have the same name.
        """
        return submit.cache_salt + self._adapters.get(submit.adapter, b"")

    def run_copies(self, copy: Callable[[Copies], None], most_bytes: int | None = None) -> None:
        """Copy restored blocks to the device and released blocks from it, between two steps.

        `copy` runs copies between device and host memory.
        """
        if self._out is None or self._in is None:
            return
        self.run_maintenance()
        if not self.restorer.is_quiet:
            for portion in self.restorer.take_read():
                self._restore_blocks(portion.hashes, portion.rows, portion.taken, copy)
            self.restorer.read(self._in)
        if not self.saver.is_quiet:
            self.saver.save(self._ledger, self._out, most_bytes or TURN_BYTES[self._kind])

    def forget_tenants(self, tenant_ids: Collection[str]) -> int:
        """Delete the tenants' files, now and whenever more are found; return the number of known files."""
        return self.saver.forget_tenants(tenant_ids)

    def invalidate(self, hashes: Collection[bytes]) -> None:
        """Prevent blocks with these hashes from being restored or written."""
        self.saver.invalidate(hashes)

    def run_maintenance(self) -> None:
        """Do the work that continues during sleep: add found files, finish writes, delete expired files."""
        self._take_found()
        self._expire()
        self.saver.take_written()

    # ── who waits for it ──

    def must_wait(self, submit: CoreSubmit, grammar: GrammarHandle | None) -> bool:
        """Return whether the request waits here for the beginning of its prompt."""
        if not self.index.num_blocks or submit.transfer_id:
            return False
        ledger = self._ledger
        probe = Sequence(submit, order=0, seed=0, answer_apart=ledger.answers_apart)
        hits = ledger.find_prefix(probe)
        first = end = len(hits)
        while (block_hash := ledger.next_hash(probe, end)) is not None:
            if not ledger.holds(block_hash) and self.index.find(block_hash) is None:
                break
            end += 1
        if end == first:
            return False
        # includes blocks in host memory: restored blocks may evict them there
        wanted = [probe.block_hashes.at(place, ledger.block_size) for place in range(end)]
        wanted = [one for one in wanted if ledger.pool.find(one) is None and self.index.find(one) is not None]
        size, empty = ledger.block_size, StepShape()
        shape = empty.with_prefill((end - first) * size, first * size)
        step_time = self._scheduler.step_time
        compute_s = step_time.predict_s(shape) - step_time.predict_s(empty)
        is_known = step_time.num_observed >= KNOWN_STEPS
        block_bytes = self.folder.block_bytes
        if not self.restorer.add_request(submit, grammar, wanted, compute_s, block_bytes, is_known=is_known):
            return False
        ledger.refresh(hits)
        return True

    def take_ready(self) -> Iterator[tuple[CoreSubmit, GrammarHandle | None]]:
        """Yield the requests that need not wait any longer, with their grammars."""
        for submit, grammar in self.restorer.take_ready():
            probe = Sequence(submit, order=0, seed=0, answer_apart=self._ledger.answers_apart)
            self._ledger.refresh(self._ledger.find_prefix(probe))
            yield submit, grammar

    # ── within ──

    def _released(self, sequence: Sequence) -> None:
        hashes = sequence.block_hashes.between(0, sequence.kv.num_sealed, self._ledger.block_size)
        submit = sequence.request.submit
        kept = Kept(time.time() + submit.keep_s, submit.tenant_weight) if submit.keep_s > 0 else None
        self.saver.offer(submit.tenant_id, hashes, kept)

    def _restore_blocks(
        self, hashes: list[bytes], rows: Rows, taken: list[int], copy: Callable[[Copies], None]
    ) -> None:
        """Copy read rows into free blocks, after the blocks' old contents have been copied elsewhere."""
        adopted = self._ledger.adopt(hashes)
        copy(self._ledger.take_copies())
        pairs = [(row, adopted[one]) for one, row in zip(hashes, taken, strict=True) if one in adopted]
        rows.copy_in(pairs, taken)
        self._ledger.adopted(adopted)
        self.restorer.record_restored(len(pairs), len(pairs) * self.folder.block_bytes)

    def _scan(self) -> None:
        begin_s, num_files = time.monotonic(), 0
        try:
            for stored in self.folder.scan():
                self._found.append(stored)
                num_files += 1
        except OSError as exc:
            log.warning(
                "disk_cache_unreadable",
                reason=exc.strerror,
                advice="check the permissions of the folder of --disk-cache; requests are served without it",
            )
        log.info("disk_cache_scanned", num_files=num_files, duration_s=round(time.monotonic() - begin_s, 3))

    def _take_found(self) -> None:
        while self._found:
            stored = self._found.popleft()
            self.saver.remove(self.index.add(stored))
            self.index.keep(stored, stored.kept, time.time())

    def _expire(self) -> None:
        now_s = time.time()
        if now_s >= self._expires_s:
            self._expires_s = now_s + EXPIRY_INTERVAL_S
            self.saver.remove(self.index.take_unused_since(now_s - self._ttl_s))
