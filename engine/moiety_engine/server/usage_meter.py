"""Usage of ended requests, kept until a gateway has stored it.

The engine's own count proves the usage that a dead gateway did not report. If nothing is received from a gateway for a
while, its unacknowledged usage is sent to another gateway. With a log, this survives the engine: the usage that an
earlier engine left in the log counts as ended. A gateway that is still connected normally acknowledges that usage by
itself; the engine sends it what it seems to have forgotten, since a UsageAcknowledgement may have been lost with the
earlier engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from operator import itemgetter

import structlog

from moiety_engine.server.request import OpenRequest
from moiety_engine.server.unacknowledged_usage_log import FLUSH_S, Key, UnacknowledgedUsageLog
from moiety_engine.server.usage_journal import UsageJournal, UsageLine
from moiety_wire.messages import Failed, Finished, MeteredUsage, Submit

MAX_RECORDS = 200_000
RECORDS_AT_ONCE = 256  # records per message
GRACE_S = 10.0  # time after a gateway's last message in which it may reconnect and acknowledge
REPEAT_S = 5.0

log = structlog.get_logger()


class UsageMeter:
    """Owns the usage records, by gateway process and request. Used by one thread.

    Requests without a billing context are not recorded.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        journal: UsageJournal | None = None,
        unacknowledged: UnacknowledgedUsageLog | None = None,
        *,
        max_records: int = MAX_RECORDS,
    ) -> None:
        self._clock = clock
        self._journal = journal
        self._log = unacknowledged
        self._max_records = max_records
        self._running: dict[Key, OpenRequest] = {}  # admitted requests with a billing context
        self._records: dict[Key, MeteredUsage] = {}
        self._inherited: set[Key] = set()  # records of an earlier engine
        self._changed: set[Key] = set()  # records whose change is not in the log yet
        self._num_of: defaultdict[str, int] = defaultdict(int)  # number of records per process
        self._heard_at_s: dict[str, float] = {}  # time of the last message, of processes with records
        self._sent_at_s: dict[Key, float] = {}
        self._sent_to: defaultdict[Key, set[str]] = defaultdict(set)  # processes that a record was sent to
        self.num_lost = 0
        self._began_at_s = clock()
        for record in unacknowledged.read() if unacknowledged is not None else ():
            self._inherited.add((record.replica_id, record.request_id))
            self._keep(record)

    @property
    def replicas(self) -> set[str]:
        """Gateway processes with unacknowledged usage."""
        return set(self._num_of)

    @property
    def num_unacknowledged(self) -> int:
        """Ended requests whose usage no gateway has acknowledged."""
        return len(self._records)

    def begin(self, replica_id: str, request: OpenRequest) -> None:
        """Record that a request was admitted."""
        if self._log is not None and request.submit.billing_context:
            key = replica_id, request.request_id
            self._running[key] = request
            self._inherited.discard(key)  # it was resumed after it had ended

    def note(self, replica_id: str, submit: Submit, end: Finished | Failed, served_class: str) -> None:
        """Record that an admitted request has ended."""
        if not served_class:
            return
        num_cached = end.num_cached_tokens if isinstance(end, Finished) else 0
        self._write_down(replica_id, submit, served_class, num_cached, end)
        if not submit.billing_context:
            return
        self._running.pop((replica_id, submit.request_id), None)
        self._keep(
            MeteredUsage(
                replica_id,
                submit.request_id,
                submit.billing_context,
                served_class,
                num_cached,
                end.num_output_tokens,
                end.expert_read_bytes,
                end.expert_moved_bytes,
            )
        )

    def _keep(self, record: MeteredUsage) -> None:
        key = record.replica_id, record.request_id
        if key not in self._records:
            self._num_of[record.replica_id] += 1
        self._records[key] = record
        self._note_change(key)
        self._heard_at_s.setdefault(record.replica_id, self._clock())
        if len(self._records) > self._max_records:
            lost = self._records[next(iter(self._records))]
            self.num_lost += 1
            log.error(
                "usage_forgotten",
                request_id=lost.request_id,
                replica_id=lost.replica_id,
                advice="restore the connection of this gateway: this usage is lost",
            )
            self.acknowledge(lost.replica_id, [lost.request_id])

    def _write_down(
        self, replica_id: str, submit: Submit, served_class: str, num_cached: int, end: Finished | Failed
    ) -> None:
        if self._journal is None:
            return
        line = UsageLine(
            at_unix_ns=0,
            engine_id="",
            replica_id=replica_id,
            request_id=submit.request_id,
            tenant_id=submit.tenant_id,
            model=submit.model,
            served_class=served_class,
            prompt_tokens=len(submit.prompt_ids),
            cached_tokens=num_cached,
            output_tokens=end.num_output_tokens,
            expert_read_bytes=end.expert_read_bytes,
            expert_moved_bytes=end.expert_moved_bytes,
        )
        try:
            self._journal.add(line)
        except OSError as error:
            log.error(
                "usage_journal_failed",
                error=str(error),
                request_id=submit.request_id,
                output_tokens=end.num_output_tokens,
                advice="check the free space and the permissions of the folder of the journal",
            )

    def acknowledge_from(self, sender: str, replica_id: str, request_ids: Collection[str]) -> int:
        """Process an acknowledgement by the process `sender`. Return how many of the requests it may not acknowledge.

        It may acknowledge its own usage, and the usage that was sent to it.
        """
        if sender == replica_id:
            self.acknowledge(replica_id, request_ids)
            return 0
        known = [one for one in request_ids if (replica_id, one) in self._records]
        allowed = [one for one in known if sender in self._sent_to.get((replica_id, one), ())]
        self.acknowledge(replica_id, allowed)
        return len(known) - len(allowed)

    def note_sent(self, replica_id: str, records: Iterable[MeteredUsage]) -> None:
        """Record that these records were sent to that process, which may now acknowledge them."""
        for record in records:
            self._sent_to[record.replica_id, record.request_id].add(replica_id)

    def acknowledge(self, replica_id: str, request_ids: Iterable[str]) -> None:
        """Delete the usage of these requests, which is stored. Unknown requests are ignored."""
        for request_id in request_ids:
            key = replica_id, request_id
            if self._records.pop(key, None) is None:
                continue
            self._note_change(key)
            self._inherited.discard(key)
            self._sent_at_s.pop(key, None)
            self._sent_to.pop(key, None)
            self._num_of[replica_id] -= 1
            if self._num_of[replica_id] == 0:
                del self._num_of[replica_id]
                self._heard_at_s.pop(replica_id, None)

    def due_of_absent(self, connected: Collection[str]) -> list[MeteredUsage]:
        """Return the usage of gateways that are gone, to be sent to another gateway now.

        `connected` are the gateway processes that are connected.
        """
        now_s = self._clock()
        for replica_id in connected:
            if replica_id in self._heard_at_s:
                self._heard_at_s[replica_id] = now_s
        gone = {replica_id for replica_id, at_s in self._heard_at_s.items() if now_s - at_s > GRACE_S}
        return self._due((key for key in self._records if key[0] in gone), now_s) if gone else []

    def due_from_earlier_engine(self, replica_id: str) -> list[MeteredUsage]:
        """Return usage of a connected gateway that an earlier engine recorded, and that is not acknowledged since."""
        now_s = self._clock()
        if not self._inherited or now_s - self._began_at_s <= GRACE_S:
            return []
        return self._due((key for key in self._inherited if key[0] == replica_id), now_s)

    async def write(self) -> None:
        """Update the log. Never raises; await one call before the next."""
        if self._log is not None:
            changed, self._changed = self._changed, set()
            await self._log.write(self._running, self._records, changed)

    async def write_until(self, closing: asyncio.Event) -> None:
        """Update the log every FLUSH_S until `closing` is set, and then once more."""
        while not closing.is_set():
            await self.write()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(closing.wait(), FLUSH_S)
        await self.write()

    def _note_change(self, key: Key) -> None:
        if self._log is not None:
            self._changed.add(key)

    def _due(self, keys: Iterable[Key], now_s: float) -> list[MeteredUsage]:
        """Return the records among these keys that were not sent recently, the longest unsent first."""
        sent = ((self._sent_at_s.get(key, float("-inf")), key) for key in keys)
        due = [(at_s, key) for at_s, key in sent if now_s - at_s >= REPEAT_S]
        chosen = [key for _, key in heapq.nsmallest(RECORDS_AT_ONCE, due, key=itemgetter(0))]
        self._sent_at_s |= dict.fromkeys(chosen, now_s)
        return [self._records[key] for key in chosen]
