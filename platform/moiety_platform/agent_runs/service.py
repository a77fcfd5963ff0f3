"""Runs of one gateway process: joins requests to their runs, ends them when a run ends, and stores what they used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from moiety_platform.agent_runs import store
from moiety_platform.agent_runs.models import MAX_REQUEST_ID_LENGTH, AgentRun, AgentRunRequest
from moiety_platform.agent_runs.request_of_run import RequestOfRun
from moiety_platform.agent_runs.reservation import RunReservation
from moiety_platform.agent_runs.terms import RUN_TAG, RunStatus, deadline_passed, named_run, parse_run, stopped
from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.usage.attribution import tagged_attribution
from moiety_platform.usage.row import UsageRow

WATCH_S = 1.0
ATTEMPTS, PAUSE_S = 20, 0.5  # to store the end of a request

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class AgentRuns:
    """Runs of one gateway process. Owned by the entry point, which starts and stops it. Fails closed."""

    database: Database
    quotas: QuotaEnforcer
    clock: Clock
    _open: dict[str, dict[str, RequestRecord]] = field(default_factory=dict)  # by run and request

    def __post_init__(self) -> None:
        self._ends: set[asyncio.Task[None]] = set()
        self._watch = PeriodicTask("agent-runs", self.end_requests_of_ended_runs, WATCH_S)

    async def __aenter__(self) -> AgentRuns:
        self._watch.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._watch.stop()
        if self._ends:
            await asyncio.wait(self._ends)

    async def join(self, record: RequestRecord, header: bytes | None = None) -> RequestOfRun:
        """Let a request take part in the run that its header or its tags name, and begin that run if it is new.

        Raises BadRequest, Forbidden where the run is over, Conflict for other terms, or Unavailable.
        """
        terms = parse_run(named_run(header, record.attribution))
        async with self.database.write() as session:
            tenant_id, now = record.principal.tenant_id, self.clock.now()
            run = await store.join_run(session, tenant_id, terms, began_at=record.started_at, now=now)
            await store.count_request(session, run.id)
        record.attribution = tagged_attribution(record.attribution, RUN_TAG, run.name)
        part = RequestOfRun(run.name, float(run.keep_s or 0), partial(self._ended, run.id))
        reserve = partial(self._reserve, run.id, record)
        record.reservation = RunReservation(self.quotas, record.principal, run.name, reserve)
        self._open.setdefault(run.id, {})[record.request_id] = record
        return part

    async def end_requests_of_ended_runs(self) -> None:
        """End the open requests here of runs that were stopped or whose deadline has passed. Raises Unavailable."""
        if not self._open:
            return
        async with self.database.read() as session:
            ended = await store.ended_runs(session, self._open, self.clock.now())
        for run_id, run in ended.items():
            error = stopped(run.name) if run.status == RunStatus.STOPPED else deadline_passed(run.name)
            for record in list(self._open.get(run_id, {}).values()):
                for attempt in record.attempts:
                    attempt.stream.abort()
                    attempt.stream.fail(error)

    async def _reserve(
        self,
        run_id: str,
        record: RequestRecord,
        affordable: Callable[[int | None, int | None], int],
        cost_of: Callable[[int], int],
    ) -> int:
        """Reserve tokens of the run for a request, see `ReserveTokens`. Raises Forbidden where the run is over."""
        now, request_id = self.clock.now(), record.request_id[:MAX_REQUEST_ID_LENGTH]
        async with self.database.write() as session:
            run = await store.lock_run(session, run_id)
            store.require_open(run, now)
            tokens = affordable(*await store.left_of(session, run, request_id, now))
            if tokens:
                found = await session.get(AgentRunRequest, (run_id, request_id))
                if found is None:
                    found = _request_of(run, record, request_id)
                    session.add(found)
                found.model, found.tokens, found.nano = record.served_model, tokens, cost_of(tokens)
        return tokens

    def _ended(self, run_id: str, row: UsageRow) -> None:
        """Store what a request has used; called once, as its record is closed."""
        requests = self._open.get(run_id, {})
        requests.pop(row.request_id, None)
        if not requests:
            self._open.pop(run_id, None)
        task = asyncio.create_task(self._store_end(run_id, row), name="agent_run_end")
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _store_end(self, run_id: str, row: UsageRow) -> None:
        for attempt in range(ATTEMPTS):
            try:
                async with self.database.write() as session:
                    await store.end_request(session, run_id, row, self.clock.now())
            except Unavailable as error:
                reason = str(error)
                await asyncio.sleep(PAUSE_S * min(attempt, 4))
            else:
                return
        advice = "its reservation counts as used for a day; check the database"
        log.warning("agent_run_request_not_stored", request_id=row.request_id, reason=reason, advice=advice)


def _request_of(run: AgentRun, record: RequestRecord, request_id: str) -> AgentRunRequest:
    return AgentRunRequest(
        run_id=run.id,
        request_id=request_id,
        tenant_id=run.tenant_id,
        trace_id=record.trace.trace_id or "",
        endpoint=record.endpoint,
        started_at=record.started_at,
        outcome=store.OPEN,
        prompt_tokens=0,
        cached_tokens=0,
        output_tokens=0,
    )
