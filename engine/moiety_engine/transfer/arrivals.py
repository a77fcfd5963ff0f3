"""Requests whose KV comes from another engine. They wait here until it is there, or is known not to come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import structlog

from moiety_engine.messages import CoreSubmit
from moiety_engine.transfer.landing import LandingZone, Progress, prompt_hash
from moiety_wire.roles import Arrival

ANNOUNCED_S = 5.0  # in which the other engine's word must have come: it was sent before the request was

log = structlog.get_logger()


@dataclass(slots=True)
class _Guest:
    submit: CoreSubmit
    since_s: float
    credit_tokens: int
    credit_last: bool = False


@dataclass(frozen=True, slots=True)
class Come:
    """A request that may go on. Without an `arrival` its KV is lost."""

    submit: CoreSubmit
    arrival: Arrival | None
    credit_last: bool


class Arrivals:
    """Of one replica; used by the step loop's thread."""

    def __init__(self, zone: LandingZone, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._zone = zone
        self._clock = clock
        self._guests: dict[int, _Guest] = {}
        self._there: dict[int, tuple[str, Arrival]] = {}  # that have not landed, or have not ended
        self.taken_over_requests_total = self.lost_transfers_total = 0

    @property
    def num_waiting(self) -> int:
        return len(self._guests)

    def enter(self, submit: CoreSubmit) -> None:
        self._guests[submit.key] = _Guest(submit, self._clock(), submit.credit_tokens)

    def extend(self, key: int, credit_tokens: int, *, last: bool) -> bool:
        """False: nobody of that key waits."""
        guest = self._guests.get(key)
        if guest is None:
            return False
        guest.credit_tokens = max(guest.credit_tokens, credit_tokens)
        guest.credit_last = guest.credit_last or last
        return True

    def leave(self, key: int) -> CoreSubmit | None:
        """A guest goes, and what came for it; None if there is no such guest."""
        guest = self._guests.pop(key, None)
        if guest is None:
            return None
        self._zone.drop(guest.submit.transfer_id)
        return guest.submit

    def take_ready(self) -> Iterator[Come]:
        """Who need not wait any more."""
        now_s = self._clock()
        for key, guest in list(self._guests.items()):
            submit = guest.submit
            progress = self._zone.claim(submit.transfer_id)
            is_late = progress is Progress.UNKNOWN and now_s - guest.since_s < ANNOUNCED_S
            if progress is Progress.COMING or is_late:
                continue
            del self._guests[key]
            yield Come(
                msgspec.structs.replace(submit, credit_tokens=guest.credit_tokens),
                self._arrival(submit),
                guest.credit_last,
            )

    def arrival_of(self, key: int) -> Arrival | None:
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

    def _arrival(self, submit: CoreSubmit) -> Arrival | None:
        computed = [*submit.prompt_ids, *(submit.resumed_ids or ())][:-1]  # of the newest token there is no KV yet
        arrival = self._zone.arrival(submit.transfer_id, prompt_hash(computed))
        if arrival is None:
            self.lost_transfers_total += 1
            log.warning("kv_did_not_come", num_tokens=len(computed))
            return None
        self.taken_over_requests_total += 1
        self._there[submit.key] = submit.transfer_id, arrival
        return arrival
