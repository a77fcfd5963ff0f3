"""Requests whose KV comes from another engine. They wait here until the KV has arrived or is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import structlog

from moiety_engine.kv_transfer.rank_transfers import GroupTransferProgress
from moiety_engine.kv_transfer.staging_buffer import ANNOUNCED_S, Progress, StagingBuffer, prompt_hash
from moiety_engine.messages import CoreSubmit
from moiety_wire.roles import KvTransferTimes

MAX_HELD_S = 5.0  # longest time that received KV takes room in the staging buffer while its request awaits images

log = structlog.get_logger()


class _Received(NamedTuple):
    """A received transfer, and when its request found it."""

    transfer_id: str
    times: KvTransferTimes
    since_s: float


class KvReceiver:
    """Requests of one replica that wait for KV. Used by the step loop's thread only."""

    def __init__(
        self,
        staging_buffer: StagingBuffer,
        others: GroupTransferProgress | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the receiver. `others` are the other ranks, if there are several."""
        self._staging_buffer, self._others = staging_buffer, others
        self._clock = clock
        self._pending: dict[int, tuple[CoreSubmit, float]] = {}  # by request key, with the start of the wait
        self._there: dict[int, _Received] = {}  # by request key
        self.disaggregated_decode_requests_total = self.lost_transfers_total = 0

    @property
    def num_waiting(self) -> int:
        return len(self._pending)

    def add_request(self, submit: CoreSubmit) -> None:
        self._pending[submit.key] = submit, self._clock()

    def remove_request(self, key: int) -> CoreSubmit | None:
        """Remove a waiting request and its KV, and return it; None if no such request waits."""
        submit, _ = self._pending.pop(key, (None, 0.0))
        if submit is not None:
            self._drop(submit.transfer_id)
        return submit

    def take_ready(self) -> Iterator[CoreSubmit]:
        """Yield the requests that need not wait any more. If `arrival_of` returns None for one, its KV is lost."""
        now_s = self._clock()
        for key, (submit, since_s) in list(self._pending.items()):
            own = self._others is None or self._others.has_rank_0(submit.transfer_id)
            progress = self._staging_buffer.claim(submit.transfer_id) if own else Progress.THERE
            if progress is Progress.THERE and self._others is not None:
                progress = self._others.progress(submit.transfer_id, prompt_hash(_computed(submit)))
            is_late = progress is Progress.UNKNOWN and now_s - since_s < ANNOUNCED_S
            if progress is Progress.COMING or is_late:
                continue
            del self._pending[key]
            if progress is not Progress.THERE:
                self._drop(submit.transfer_id)
            self._receive(submit)
            yield submit

    def arrival_of(self, key: int) -> KvTransferTimes | None:
        """Return the transfer times of a request's KV; None if no KV arrived."""
        found = self._there.get(key)
        return None if found is None else found.times

    def load(
        self, key: int, first: int, tables: list[list[int]], firsts: tuple[int, ...], state_slot: int = -1
    ) -> None:
        """Copy a request's received KV into its blocks, from token `first` on; see `StagingBuffer.load`."""
        transfer_id = self._there[key].transfer_id
        if self._others is not None:
            self._others.load(transfer_id, first, tables, firsts, state_slot)
            if not self._others.has_rank_0(transfer_id):
                return
        self._staging_buffer.load(transfer_id, first, tables, firsts, state_slot)
        if self._others is not None:
            self._staging_buffer.share_loaded(self._others.copies, first, tables, firsts)

    def drop_long_held(self, keys: Iterable[int]) -> None:
        """Drop the received KV of these requests, which still wait for something else, after MAX_HELD_S.

        The requests compute their KV again.
        """
        if not self._there:
            return
        oldest_s = self._clock() - MAX_HELD_S
        for key in keys:
            found = self._there.get(key)
            if found is not None and found.since_s <= oldest_s:
                self.ended(key)
                self.lost_transfers_total += 1
                log.warning(
                    "received_kv_dropped",
                    num_tokens=found.times.num_tokens,
                    advice="check whether the gateway lost its connection to this engine",
                )

    def ended(self, key: int) -> None:
        """Drop the KV of a request that has ended, whether or not it was copied into the cache."""
        found = self._there.pop(key, None)
        if found is not None:
            self._drop(found.transfer_id)

    def _drop(self, transfer_id: str) -> None:
        self._staging_buffer.drop(transfer_id)
        if self._others is not None:
            self._others.drop(transfer_id)

    def _receive(self, submit: CoreSubmit) -> None:
        computed = _computed(submit)
        if self._others is None or self._others.has_rank_0(submit.transfer_id):
            arrival = self._staging_buffer.arrival(submit.transfer_id, prompt_hash(computed))
        else:
            arrival = self._others.arrival(submit.transfer_id)
        if arrival is None:
            self.lost_transfers_total += 1
            log.warning(
                "kv_transfer_incomplete",
                num_tokens=len(computed),
                advice="check the network between the engines, and the log of the prefill engine",
            )
            return
        self.disaggregated_decode_requests_total += 1
        self._there[submit.key] = _Received(submit.transfer_id, arrival, self._clock())


def _computed(submit: CoreSubmit) -> list[int]:
    """Return the tokens that have KV: all but the newest."""
    return [*submit.prompt_ids, *(submit.resumed_ids or ())][:-1]
