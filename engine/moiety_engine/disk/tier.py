"""Disk tier of one replica, as the step loop uses it: its files, their saver and their restorer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from moiety_engine.disk.folder import DiskFolder, Folder
from moiety_engine.disk.group_cache import SCAN_WAIT_S, GroupCache
from moiety_engine.disk.identity import digest_of_folder, digest_of_rank, identity_of
from moiety_engine.disk.rank_disk import identities
from moiety_engine.disk.rank_files import GroupFolder
from moiety_engine.disk.rows import RankRows, Rows, host_rows, num_rows
from moiety_engine.disk.saving import TURN_BYTES
from moiety_engine.disk.state_rows import num_state_pieces
from moiety_engine.distribution.rank_requests import RankRequests
from moiety_engine.errors import InvalidConfig, OutOfMemory
from moiety_engine.runner.control_messages import CopyDiskRows, OpenDiskRows
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
    from moiety_engine.runner.control_messages import ControlSender
    from moiety_engine.scheduling.scheduler import Scheduler
    from moiety_engine.structured_outputs.stepping import GrammarHandle

ROW_BYTES = {"cuda": 128 << 20, "cpu": 32 << 20}  # of host memory, in each direction
FLUSH_S = 5.0  # time that a shutdown waits for unfinished writes
EXPIRY_INTERVAL_S = 10.0
KNOWN_STEPS = 16  # observed steps after which predictions are more than a guess


class CacheMover(Protocol):
    """Mover of a cache's contents, of all ranks."""

    def move(self, copies: Copies) -> None:
        """Copy blocks between the cache and the host tier now."""

    def move_states(self, replays: list[tuple[int, int]], copies: list[tuple[int, int]]) -> None:
        """Advance and copy recurrent states now."""


class DiskTier:
    """Disk tier, used by the step loop's thread. Raises InvalidConfig where the folder is not available.

    Each rank group has its own files; so has each rank of a group, also where several have the same KV. With several
    ranks, `disk_cache_bytes` is the limit of each rank.
    """

    def __init__(
        self, config: EngineConfig, model: Transformer, scheduler: Scheduler, kv: KvCache, controls: ControlSender
    ) -> None:
        self._scheduler, self._controls = scheduler, controls
        self._ttl_s = config.disk_cache_ttl_s
        self._parent, self._block_bytes = Path(config.disk_cache), HostKv.bytes_of_a_block(kv)
        if config.disk_cache_bytes < 2 * self._block_bytes:
            raise InvalidConfig(
                f"disk_cache_bytes ({config.disk_cache_bytes}) must be at least two blocks of {self._block_bytes} bytes"
            )
        num_pieces = num_state_pieces(kv)
        if config.disk_cache_bytes < (2 + num_pieces) * self._block_bytes:
            raise InvalidConfig(
                f"disk_cache_bytes ({config.disk_cache_bytes}) must be at least two blocks and a recurrent state, "
                f"{(2 + num_pieces) * self._block_bytes} bytes"
            )
        self._kind = model.device.type
        self._adapters = {
            name: digest_of_folder(Path(folder), self._parent) for name, folder in sorted(config.adapters.items())
        }
        self._num_opened_rows, self._key = 0, secrets.token_bytes(32)
        self._requests: RankRequests | None = None
        self._identity = b""
        self._rows = self._open_rows(kv, lambda: self._identify(config, model, kv))
        self.groups = [
            GroupCache(folder, ledger, config.disk_cache_bytes, num_pieces)
            for folder, ledger in zip(self._open_folders(), scheduler.groups, strict=True)
        ]
        self._expires_s = 0.0
        until_s = time.monotonic() + SCAN_WAIT_S
        for group in self.groups:
            group.wait_for_scan(max(0.0, until_s - time.monotonic()))
        self._attach()

    @property
    def first(self) -> GroupCache:
        """Cache of the first rank group."""
        return self.groups[0]

    @property
    def is_quiet(self) -> bool:
        """Return whether no read or write is in progress."""
        return all(group.is_quiet for group in self.groups)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks."""
        return sum(group.restorer.num_waiting for group in self.groups)

    def remove_request(self, key: int) -> CoreSubmit | None:
        """Remove a waiting request; None if there is none. Its reads are still restored."""
        removed = (group.restorer.remove_request(key) for group in self.groups)
        return next((submit for submit in removed if submit is not None), None)

    def serve(self, kv: KvCache) -> None:
        """Attach the tier to this cache. Raises OutOfMemory."""
        self._rows = self._open_rows(kv, lambda: None)
        self._attach()

    def _identify(self, config: EngineConfig, model: Transformer, kv: KvCache) -> None:
        rank_group = self._controls.rank_group
        if rank_group is None:
            self._identity = identity_of([digest_of_rank(model, config, kv, self._parent)], 0)
        else:
            self._identity = identities(config, model, rank_group, kv, self._key)
            self._requests = RankRequests(rank_group.store, self._key)

    def _open_folders(self) -> list[Folder]:
        """Open this rank's folder, and return the folder of each rank group."""
        own = DiskFolder(self._parent, self._identity, self._block_bytes)
        rank_group, requests = self._controls.rank_group, self._requests
        if rank_group is None or requests is None:
            return [own]
        found: list[Folder] = []
        for members in rank_group.ranks.rank_position.layout.cache_groups:
            others = [rank for rank in members if rank]
            given = own if len(others) < len(members) else None
            found.append(GroupFolder(given, self._parent, self._identity, self._block_bytes, others, requests))
        return found

    def _open_rows(self, kv: KvCache, identify: Callable[[], None]) -> list[tuple[Rows, Rows]]:
        """Allocate rows on all ranks, out of each group's cache and into it. Raises OutOfMemory."""
        num_bytes = ROW_BYTES[self._kind]
        count = num_rows(self._block_bytes, num_bytes)
        ids = self._num_opened_rows, self._num_opened_rows + 1
        self._num_opened_rows += len(ids)
        try:
            with self._controls.run_on_all_ranks(OpenDiskRows(ids, count, self._key)):
                identify()
                hosts = [host_rows(kv, count) for _ in ids]
        except RuntimeError as exc:  # the type that torch raises
            raise OutOfMemory(
                f"the host has too little memory for the disk cache's buffers of 2 × {num_bytes >> 20} MiB"
            ) from exc
        rank_group = self._controls.rank_group
        if rank_group is None:
            out, into = (Rows(host, count, self._block_bytes) for host in hosts)
            return [(out, into)]
        found: list[tuple[Rows, Rows]] = []
        for group, members in enumerate(rank_group.ranks.rank_position.layout.cache_groups):
            send = partial(self._send_copies, group)
            owns = [host if 0 in members else None for host in hosts]
            pair = [RankRows(own, count, self._block_bytes, one, send) for own, one in zip(owns, ids, strict=True)]
            found.append((pair[0], pair[1]))
        return found

    def _send_copies(self, group: int, rows_id: int, outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> None:
        self._controls.send(CopyDiskRows(group, rows_id, outs, ins))

    def _attach(self) -> None:
        for group, (out, into) in zip(self.groups, self._rows, strict=True):
            group.rows_out, group.rows_in = out, into

    def detach(self, mover: CacheMover) -> None:
        """Write blocks for a few seconds at most, then detach the cache. Only while no request is open."""
        self._flush(mover)
        self._rows = []
        for group in self.groups:
            group.detach()

    def _flush(self, mover: CacheMover) -> None:
        until_s = time.monotonic() + FLUSH_S
        while (left_s := until_s - time.monotonic()) > 0:
            writing = [group for group in self.groups if not group.saver.is_quiet]
            if not writing:
                break
            self.run_copies(mover, most_bytes=ROW_BYTES[self._kind])
            writing[0].saver.wait(left_s)

    def close(self, mover: CacheMover | None) -> None:
        """Close the tier. `mover`: None while there is no cache."""
        if mover is not None:
            self._flush(mover)
        if self._requests is not None:
            self._requests.close()
        for group in self.groups:
            group.close()

    def salted(self, submit: CoreSubmit) -> bytes:
        """Return the request's salt, with the digest of an operator's adapter.

        After a restart, another adapter may have the same name.
        """
        return submit.cache_salt + self._adapters.get(submit.adapter, b"")

    def run_copies(self, mover: CacheMover, most_bytes: int | None = None) -> None:
        """Copy restored blocks and states to the device and released ones from it, between two steps."""
        if not self._rows:
            return
        self.run_maintenance()
        groups = self._scheduler.groups
        if self.first.states is not None:
            if self.is_quiet:
                self._forget_keys()
                return
            mover.move_states(groups.take_state_replays(), groups.take_state_copies())  # snapshots that are only queued
        for group in self.groups:
            if not group.restorer.is_quiet:
                group.restore(lambda: mover.move(groups.take_copies()))
            group.save(most_bytes or TURN_BYTES[self._kind])
            group.forget_unused_keys()

    def _forget_keys(self) -> None:
        for group in self.groups:
            if group.states is not None:
                group.states.forget_keys()

    def forget_tenants(self, tenant_ids: Collection[str]) -> int:
        """Delete the tenants' files, now and whenever more are found; return the number of known files."""
        return sum(group.saver.forget_tenants(tenant_ids) for group in self.groups)

    def invalidate(self, hashes: Collection[bytes]) -> None:
        """Prevent blocks with these hashes from being restored or written."""
        for group in self.groups:
            group.invalidate(hashes)

    def run_maintenance(self) -> None:
        """Do the work that continues during sleep: add found files, finish writes, delete expired files."""
        now_s = time.time()
        expires = now_s >= self._expires_s
        if expires:
            self._expires_s = now_s + EXPIRY_INTERVAL_S
        for group in self.groups:
            group.take_found()
            if expires:
                group.saver.remove(group.index.take_unused_since(now_s - self._ttl_s))
            group.saver.take_written()

    # ── requests that wait for blocks ──

    def must_wait(self, submit: CoreSubmit, grammar: GrammarHandle | None) -> bool:
        """Return whether the request waits here for the beginning of its prompt."""
        if submit.transfer_id or not any(group.index.num_blocks for group in self.groups):
            return False
        found = [(group.find_prefix(self._probe(submit)), group) for group in self.groups]
        prefix, group = max(found, key=lambda one: one[0].num_blocks)
        first = max(len(one.hits) for one, _ in found)
        if prefix.num_blocks <= first or not prefix.num_restorable:
            return False
        size, empty = group.ledger.block_size, StepShape()
        shape = empty.with_prefill((prefix.num_blocks - first) * size, first * size)
        step_time = self._scheduler.step_time
        compute_s = step_time.predict_s(shape) - step_time.predict_s(empty)
        is_known = step_time.num_observed >= KNOWN_STEPS
        waits = group.restorer.add_request(
            submit, grammar, prefix.wanted, compute_s, group.folder.block_bytes, is_known=is_known
        )
        if waits:
            group.ledger.refresh(prefix.hits)
        return waits

    def take_ready(self) -> Iterator[tuple[CoreSubmit, GrammarHandle | None]]:
        """Yield the requests that need not wait any longer, with their grammars."""
        for group in self.groups:
            for submit, grammar in group.restorer.take_ready():
                group.ledger.refresh(group.ledger.find_prefix(self._probe(submit)))
                yield submit, grammar

    def _probe(self, submit: CoreSubmit) -> Sequence:
        return Sequence(submit, order=0, seed=0, answer_apart=self._scheduler.kv.answers_apart)
