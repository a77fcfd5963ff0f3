"""Requests whose KV comes from another engine. They wait here until it is there, or is known not to come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import structlog

from moiety_engine.kv_transfer.staging_buffer import Progress, StagingBuffer, prompt_hash
from moiety_engine.messages import CoreSubmit
from moiety_wire.roles import KvTransferTimes

ANNOUNCED_S = 5.0  # in which the other engine's word must have come: it was sent before the request was

log = structlog.get_logger()


class KvReceiver:
    """Of one replica; used by the step loop's thread."""

    def __init__(self, zone: StagingBuffer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._zone = zone
        self._clock = clock
        self._pending: dict[int, tuple[CoreSubmit, float]] = {}  # by the request's key: who, and since when
        self._there: dict[int, tuple[str, KvTransferTimes]] = {}  # that have not landed, or have not ended
        self.disaggregated_decode_requests_total = self.lost_transfers_total = 0

    @property
    def num_waiting(self) -> int:
        return len(self._pending)

    def enter(self, submit: CoreSubmit) -> None:
        self._pending[submit.key] = submit, self._clock()

    def leave(self, key: int) -> CoreSubmit | None:
        """A pending goes, and what came for it; None if there is no such pending."""
        submit, _ = self._pending.pop(key, (None, 0.0))
        if submit is not None:
            self._zone.drop(submit.transfer_id)
        return submit

    def take_ready(self) -> Iterator[CoreSubmit]:
        """Who need not wait any more. The KV of one without an arrival (`arrival_of`) is lost."""
        now_s = self._clock()
        for key, (submit, since_s) in list(self._pending.items()):
            progress = self._zone.claim(submit.transfer_id)
            is_late = progress is Progress.UNKNOWN and now_s - since_s < ANNOUNCED_S
            if progress is Progress.COMING or is_late:
                continue
            del self._pending[key]
            self._receive(submit)
            yield submit

    def arrival_of(self, key: int) -> KvTransferTimes | None:
        """How the KV of a request came."""
        found = self._there.get(key)
        return None if found is None else found[1]

    def land(self, key: int, first: int, blocks: list[int]) -> None:
        """Write what came for a request into its blocks, from token `first` on."""
        self._zone.land(self._there[key][0], first, blocks)

    def ended(self, key: int) -> None:
        """A request has ended, whether or not its KV had landed."""
        found = self._there.pop(key, None)
        if found is not None:
            self._zone.drop(found[0])

    def _receive(self, submit: CoreSubmit) -> None:
        computed = [*submit.prompt_ids, *(submit.resumed_ids or ())][:-1]  # of the newest token there is no KV yet
        arrival = self._zone.arrival(submit.transfer_id, prompt_hash(computed))
        if arrival is None:
            self.lost_transfers_total += 1
            log.warning("kv_did_not_come", num_tokens=len(computed))
            return
        self.disaggregated_decode_requests_total += 1
        self._there[submit.key] = submit.transfer_id, arrival
