"""Background service of each gateway process that deletes expired rows.

Jobs that find nothing share a transaction, as long as it is short. Each transaction that deletes rows is followed by a
pause, so that on SQLite other writers proceed, and on PostgreSQL nothing is locked for long. When the database is down
it waits and continues later. Another gateway takes the job of a killed gateway once its lease has expired.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.object_storage.store import UNAVAILABLE as OBJECTS_UNAVAILABLE
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.retention.leases import Now, claim_job, claim_jobs, delay_jobs, due
from moiety_platform.retention.metrics import RetentionMetrics
from moiety_platform.shared_wake_ups import DUE_SHARE

LEASE_S = 60.0
PAUSE_S = 0.05
SHARED_S = 0.02  # after which jobs that find nothing begin another transaction
CHECKS_PER_INTERVAL = 4  # so that a job runs soon after it is due

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RetentionJob:
    """One job on rows.

    `purge` deletes some expired rows, or sums some up, within the caller's transaction; it returns the number of rows
    or days, 0 once nothing is left. After a kill at any point, the next call finds the rest.
    """

    name: str
    purge: Callable[[AsyncSession], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class ObjectJob:
    """One job on objects and their rows.

    `work` does the same in transactions of its own, so that none is open while the object store is asked; two gateways
    may call it at once. `interval_s` is the pause of a job that is rarer than the others.
    """

    name: str
    work: Callable[[], Awaitable[int]]
    interval_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """Result of running jobs together: the first `num_idle` found nothing, and the next one deleted `num_rows`.

    `is_late` says that no further job was run, since the transaction had lasted long enough.
    """

    num_idle: int
    num_rows: int = 0
    is_late: bool = False


@dataclass(eq=False)
class RetentionService:
    """Runner of the retention jobs. Owned by the entry point; for one event loop. `owner` must be a unique id."""

    owner: str
    database: Database
    jobs: Sequence[RetentionJob | ObjectJob]  # can be changed, for the rounds to come
    metrics: RetentionMetrics
    _: KW_ONLY
    interval_s: float
    lease_s: float = LEASE_S
    pause_s: float = PAUSE_S
    shared_s: float = SHARED_S
    now: Now = now_ms

    def __post_init__(self) -> None:
        self._rounds = PeriodicTask("retention", self.round, self.interval_s / CHECKS_PER_INTERVAL)

    def use(self, jobs: Sequence[RetentionJob | ObjectJob], interval_s: float) -> None:
        """Use these jobs and this interval from the next round on, which begins now."""
        self.jobs, self.interval_s = jobs, interval_s
        self._rounds.every_s = interval_s / CHECKS_PER_INTERVAL
        self._rounds.wake()

    async def start(self) -> None:
        self._rounds.start()

    async def stop(self) -> None:
        """Stop after the running transaction. Idempotent."""
        await self._rounds.stop()

    async def round(self) -> dict[str, int]:
        """Run every due job to its end; return the number of deleted rows of each. Raises Unavailable."""
        async with self.database.read() as session:
            names = await due(session, [job.name for job in self.jobs], self.now)
        done: dict[str, int] = {}
        for _, group in itertools.groupby((job for job in self.jobs if job.name in names), type):
            jobs = list(group)
            while jobs and not self._rounds.is_stopping:
                found = await self._find_idle(jobs)
                done |= {job.name: 0 for job in jobs[: found.num_idle]}
                jobs = jobs[found.num_idle :]
                if jobs and not found.is_late:
                    job = jobs.pop(0)
                    done[job.name] = await self._do(job, found.num_rows)
        return done

    async def _find_idle(self, jobs: Sequence[RetentionJob | ObjectJob]) -> _Found:
        """Run the jobs, which are of one kind, in a common transaction up to the first that finds something or fails.

        Raises Unavailable.
        """
        names, num_idle = [job.name for job in jobs], 0
        if not isinstance(jobs[0], RetentionJob):
            return _Found(0)
        try:
            async with self.database.write() as session:
                ours = await claim_jobs(session, names, self.owner, round(self.lease_s * 1000), self.now)
                num_rows, is_late, begin_s = 0, False, time.monotonic()
                for job in jobs:
                    assert isinstance(job, RetentionJob), "the jobs are of one kind"
                    num_rows = await job.purge(session) if job.name in ours else 0
                    if num_rows:
                        break
                    num_idle += 1
                    if is_late := time.monotonic() - begin_s > self.shared_s:
                        break
                if idle := ours.intersection(names[:num_idle]):
                    await delay_jobs(session, idle, self._pause_ms(), self.now)
                return _Found(num_idle, num_rows, is_late)
        except Unavailable:
            raise
        except Exception:  # the job that fails runs alone, where its failure is logged
            return _Found(0)

    async def _do(self, job: RetentionJob | ObjectJob, num_rows: int = 0) -> int:
        """Run one job, whose failure does not affect the others; `num_rows` were deleted before. Raises Unavailable."""
        total = 0
        try:
            while num_rows := num_rows or await self._step(job):
                total += num_rows
                self.metrics.observe(job.name, num_rows)
                num_rows = 0
                await asyncio.sleep(self.pause_s)
                if self._rounds.is_stopping:
                    break
        except Unavailable as error:
            if error.code != OBJECTS_UNAVAILABLE:
                raise
            log.warning(
                "retention_waits_for_object_store",
                job=job.name,
                reason=str(error),
                advice="restore the connection to the object store; the job runs again",
            )
            self.metrics.observe_failure(job.name)
        except Exception:  # top level of a job: logged, and retried when its lease has expired
            log.exception("retention_failed", job=job.name)
            self.metrics.observe_failure(job.name)
        if total:
            log.info("retention_done", job=job.name, rows=total)
        return total

    async def _step(self, job: RetentionJob | ObjectJob) -> int:
        """Run one transaction; return the number of deleted rows.

        0 if none are left, or another gateway runs the job.
        """
        async with self.database.write() as session:
            if not await claim_job(session, job.name, self.owner, round(self.lease_s * 1000), self.now):
                return 0
            num_rows = 0
            if isinstance(job, RetentionJob):
                num_rows = await job.purge(session)
                if num_rows == 0:
                    await delay_jobs(session, [job.name], self._pause_ms(), self.now)
        return await self._work(job) if isinstance(job, ObjectJob) else num_rows

    async def _work(self, job: ObjectJob) -> int:
        num_rows = await job.work()
        if num_rows == 0:
            async with self.database.write() as session:
                await delay_jobs(session, [job.name], self._pause_ms(job.interval_s), self.now)
        return num_rows

    def _pause_ms(self, interval_s: float | None = None) -> int:
        """Return the time after which a job is due again, which is over at the check at the end of the interval."""
        return round(DUE_SHARE * 1000 * (self.interval_s if interval_s is None else interval_s))
