"""Batch worker of one gateway process; the workers of all gateways share the database's batches.

It claims as many lines as it has free places, answers them, and stores the collected outcomes in one transaction. When
the database is away, outcomes wait in memory and nothing new is claimed. A draining gateway gives back at once all
lines without a part of an answer, a stopping one also the rest; a killed gateway's lines wait for the end of their
leases.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

import structlog
from sqlalchemy import exc as sa
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.backoff import Backoff
from moiety_platform.batches.claims import (
    ClaimedLine,
    LineKey,
    OpenBatch,
    claim_lines,
    open_batches,
    renew_lines,
)
from moiety_platform.batches.closing import begin_closing
from moiety_platform.batches.execution import KeyLost, LineRunner, Outcome
from moiety_platform.batches.maintenance import BatchMaintenance
from moiety_platform.batches.models import BatchStatus
from moiety_platform.batches.outcomes import AnsweredLine, RequeuedLine, store_outcomes
from moiety_platform.batches.pacing import BatchPacing
from moiety_platform.batches.sharing import next_batch, share
from moiety_platform.clock import Clock
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.files.store import Now
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.shared_wake_ups import DUE_SHARE

POLL_S = 1.0
IDLE_POLLS = 5  # without open batches, a round is so many times as rare; a batch of this process wakes it
BYTES_AT_ONCE = 8 * 1024 * 1024  # of answers, per transaction
STOP_GRACE_S = 3.0
OUTAGE_PAUSE_S = 1.0

log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class BatchWorker:
    """Batch worker, owned by the entry point; one event loop.

    Call `start`, then `stop` before the dependencies of the lines are closed. Its id must never have been used before.
    `has_open` returns whether a batch has not ended; without it, each look reads the batches.
    """

    worker_id: str
    database: Database
    runner: LineRunner
    tending: BatchMaintenance
    clock: Clock
    _: KW_ONLY
    concurrency: int
    lease_s: float
    backoff: Backoff
    poll_s: float = POLL_S
    now: Now = now_ms
    has_open: Callable[[], Awaitable[bool]] | None = None

    def __post_init__(self) -> None:
        self._rounds = PeriodicTask("batch-worker", self._round, self.poll_s, pause_s=OUTAGE_PAUSE_S)
        self._running: dict[LineKey, tuple[ClaimedLine, asyncio.Task[Outcome]]] = {}
        self._outcomes: list[Outcome] = []
        self._batches: list[OpenBatch] = []  # as of the last poll
        self._paces: dict[str, BatchPacing] = {}
        self._dry: set[str] = set()  # batches without lines to claim at the last look
        self._polled_s = self._renewed_s = float("-inf")
        self._is_draining = False

    def use(self, concurrency: int, lease_s: float) -> None:
        """Apply new settings to later lines; with a concurrency of 0 other gateways do all the work."""
        self.concurrency, self.lease_s = concurrency, lease_s
        self._renewed_s = float("-inf")  # held lines get the new lease at once, which may be longer than the old one
        self._paces.clear()
        self.wake()

    def wake(self) -> None:
        """Look for work at once, after a batch was created or changed in this process."""
        self._polled_s = float("-inf")
        self._rounds.wake()

    async def start(self) -> None:
        self._rounds.start()

    def drain(self) -> None:
        """Begin nothing more, and give back the lines without a part of an answer; the rest continues until the stop.

        Idempotent.
        """
        self._is_draining = True
        for key, (_, task) in self._running.items():
            if not self.runner.has_begun(key):
                task.cancel()
        self._rounds.wake()

    async def stop(self) -> None:
        """Stop claiming, let lines finish for STOP_GRACE_S, then give the rest back. Idempotent."""
        self._is_draining = True
        if not await self._rounds.stop():
            return
        await self.tending.stop()
        tasks = [task for _, task in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_GRACE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._store()
        except Unavailable as error:
            log.warning(
                "batch_outcomes_not_stored",
                reason=str(error),
                lines=len(self._outcomes),
                advice="none needed: another gateway runs these lines again when their leases expire",
            )

    async def _round(self) -> None:
        """Run one round. Raises Unavailable; unstored outcomes are then kept for the next round."""
        await self._store()
        if not self.concurrency and not self._held():
            return
        now_s = self.clock.monotonic()
        if now_s - self._renewed_s >= self.lease_s / 3:
            await self._renew()
            self._renewed_s = now_s
        if not self._batches or now_s - self._polled_s >= DUE_SHARE * self.poll_s:
            self._polled_s = now_s
            await self._look()
        self._rounds.every_s = self.poll_s if self._batches or self._held() else IDLE_POLLS * self.poll_s
        await self._claim()

    async def _store(self) -> None:
        """Store the outcomes since the last round."""
        outcomes, self._outcomes = self._outcomes, []
        try:
            for some in in_pieces(outcomes):
                await self._store_some(some)
        except BaseException:  # on any error, also a stop: the next round or `stop` stores them
            self._outcomes = outcomes + self._outcomes
            raise
        running = {batch_id for batch_id, _ in self._running}
        if any(outcome.line.batch.id not in running for outcome in outcomes):
            self._polled_s = float("-inf")  # its last line may have ended

    async def _store_some(self, outcomes: Sequence[Outcome]) -> None:
        """Store outcomes in one transaction.

        An outcome that the database refuses for its content is left to its lease, alone, so that it delays no other.
        Raises Unavailable.
        """
        try:
            async with self.database.write() as session:
                await self._store_in(session, outcomes)
        except (sa.DBAPIError, sa.StatementError):
            if len(outcomes) > 1:
                middle = len(outcomes) // 2
                await self._store_some(outcomes[:middle])
                await self._store_some(outcomes[middle:])
            else:
                line = outcomes[0].line
                log.exception("batch_outcome_refused", batch_id=line.batch.id, line=line.number)

    async def _store_in(self, session: AsyncSession, outcomes: Sequence[Outcome]) -> None:
        lost = {outcome.line.batch.id: outcome.error for outcome in outcomes if isinstance(outcome, KeyLost)}
        answered = [outcome for outcome in outcomes if isinstance(outcome, AnsweredLine)]
        put_back = [
            RequeuedLine(outcome.line, 0.0, 0, 0) if isinstance(outcome, KeyLost) else outcome
            for outcome in outcomes
            if not isinstance(outcome, AnsweredLine)
        ]
        await store_outcomes(session, self.worker_id, answered, put_back, self.now)
        for batch_id, error in sorted(lost.items()):
            reason = {"code": error.code, "message": error.message}
            await begin_closing(session, batch_id, BatchStatus.FAILED, reason, self.now)

    async def _renew(self) -> None:
        """Renew the leases of held lines; cancel those that another worker has, or whose batch has ended."""
        held = self._held()
        async with self.database.write() as session:
            ours = await renew_lines(session, sorted(held), self.worker_id, round(self.lease_s * 1000), self.now)
        for key in held - ours:
            if key in self._running:
                self._running[key][1].cancel()

    def _held(self) -> set[LineKey]:
        """Return the lines that are being answered here, or whose outcome is not stored yet."""
        return {*self._running, *(outcome.line.key for outcome in self._outcomes)}

    async def _look(self) -> None:
        """Read all batches that have not ended: cancel lines that need no answer any more, and start maintenance."""
        if not self._batches and self.has_open is not None and not await self.has_open():
            return
        async with self.database.read() as session:
            self._batches = await open_batches(session, self.now)
        going_on = {batch.id for batch in self._batches if batch.status == BatchStatus.IN_PROGRESS and not batch.is_due}
        for (batch_id, _), (_, task) in self._running.items():
            if batch_id not in going_on:
                task.cancel()
        self._dry.clear()
        self._paces = {batch_id: pace for batch_id, pace in self._paces.items() if batch_id in going_on}
        if not self._is_draining and self.concurrency:
            self.tending.run_maintenance(self._batches, self.wake)

    async def _claim(self) -> None:
        """Claim lines for the free places, evenly over the tenants."""
        candidates = [batch for batch in self._batches if self._may_begin(batch) > 0]
        num_running = Counter(line.batch.tenant_id for line, _ in self._running.values())
        free = self.concurrency - len(self._running)
        while free > 0 and not self._is_draining:
            batch = next_batch(candidates, num_running)
            if batch is None:
                return
            wanted = min(share(free, candidates, num_running, batch.tenant_id), self._may_begin(batch))
            async with self.database.write() as session:
                lines = await claim_lines(session, batch, self.worker_id, wanted, round(self.lease_s * 1000), self.now)
            for line in lines:
                self._begin(line)
            free -= len(lines)
            num_running[batch.tenant_id] += len(lines)
            if len(lines) < wanted:
                self._dry.add(batch.id)
            if self._may_begin(batch) == 0:
                candidates.remove(batch)

    def _may_begin(self, batch: OpenBatch) -> int:
        """Return how many more lines of a batch may begin now."""
        if batch.status != BatchStatus.IN_PROGRESS or batch.is_due or batch.id in self._dry:
            return 0
        return self._pace(batch.id).may_begin(self._num_running(batch.id), self.clock.monotonic())

    def _pace(self, batch_id: str) -> BatchPacing:
        return self._paces.setdefault(batch_id, BatchPacing.full(max(1, self.concurrency)))

    def _num_running(self, batch_id: str) -> int:
        return sum(running_id == batch_id for running_id, _ in self._running)

    def _begin(self, line: ClaimedLine) -> None:
        if line.key in self._held():
            return  # its lease had expired, and this worker has claimed it again
        task = asyncio.create_task(self.runner.run(line), name="batch-line")
        task.add_done_callback(partial(self._end, line))
        self._running[line.key] = line, task
        if self._is_draining:  # draining began after the claim
            task.cancel()

    def _end(self, line: ClaimedLine, task: asyncio.Task[Outcome]) -> None:
        """Take the outcome of a task; give back a cancelled line.

        That changes nothing if the line belongs to another worker by now.
        """
        self._running.pop(line.key, None)
        if task.cancelled():
            self._outcomes.append(RequeuedLine(line, 0.0, line.num_refusals, line.num_failures))
        else:
            self._outcomes.append(task.result())
            self._note(line.batch.id, task.result())
        self._rounds.wake()

    def _note(self, batch_id: str, outcome: Outcome) -> None:
        """Update the batch's pacing by the outcome of a line."""
        pace, now_s = self._pace(batch_id), self.clock.monotonic()
        if isinstance(outcome, AnsweredLine):
            pace.answered(now_s)
        elif isinstance(outcome, RequeuedLine) and outcome.num_refusals > outcome.line.num_refusals:
            pace.refused(
                by_limit=outcome.by_limit,
                num_running=self._num_running(batch_id),
                wait_s=min(outcome.wait_s, self.backoff.after(pace.num_refusals)),
                now_s=now_s,
            )


def in_pieces(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Split outcomes, in order, into pieces of at most BYTES_AT_ONCE for one transaction each."""
    pieces: list[list[Outcome]] = []
    room = 0
    for outcome in outcomes:
        num_bytes = len(outcome.answer) if isinstance(outcome, AnsweredLine) else 0
        if not pieces or num_bytes > room:
            pieces.append([])
            room = BYTES_AT_ONCE
        pieces[-1].append(outcome)
        room -= num_bytes
    return pieces
