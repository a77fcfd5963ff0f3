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
from moiety_platform.agent_runs.terms import (
    RUN_TAG,
    RunStatus,
    RunTerms,
    deadline_passed,
    named_run,
    parse_run,
    stopped,
)
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


@dataclass(eq=False, slots=True)
class _Joined:
    """The part of one request in its run."""

    terms: RunTerms
    run_id: str | None = None  # once something was reserved


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
        async with self.database.read() as session:
            run = await store.find_run(session, record.principal.tenant_id, terms, self.clock.now())
        record.attribution = tagged_attribution(record.attribution, RUN_TAG, terms.name)
        joined = _Joined(terms)
        record.reservation = RunReservation(
            self.quotas, record.principal, terms.name, partial(self._reserve, joined, record)
        )
        keep_s = terms.keep_s if run is None else run.keep_s
        return RequestOfRun(terms.name, float(keep_s or 0), partial(self._ended, joined))

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
                    attempt.stream.abort(error)

    async def _reserve(
        self,
        joined: _Joined,
        record: RequestRecord,
        affordable: Callable[[int | None, int | None], int],
        cost_of: Callable[[int], int],
    ) -> int:
        """Reserve tokens of the run for a request, see `ReserveTokens`, once its quotas hold.

        The first reservation begins the run if it is new, so a request that a quota refuses writes nothing. Raises
        Forbidden where the run is over, or Conflict for other terms.
        """
        now, request_id = self.clock.now(), record.request_id[:MAX_REQUEST_ID_LENGTH]
        was_new = joined.run_id is None
        try:
            async with self.database.write() as session:
                if joined.run_id is None:
                    tenant_id = record.principal.tenant_id
                    run = await store.join_run(session, tenant_id, joined.terms, began_at=record.started_at, now=now)
                    await store.count_request(session, run.id)
                run = await store.lock_run(session, run.id if joined.run_id is None else joined.run_id)
                store.require_open(run, now)
                tokens = affordable(*await store.left_of(session, run, request_id))
                if tokens:
                    found = await session.get(AgentRunRequest, (run.id, request_id))
                    if found is None:
                        found = _request_of(run, record, request_id)
                        session.add(found)
                    found.model, found.tokens, found.nano = record.served_model, tokens, cost_of(tokens)
                joined.run_id = run.id
        except Exception:  # not a cancellation, after which the transaction may have been committed
            joined.run_id = None if was_new else joined.run_id
            raise
        self._open.setdefault(run.id, {})[record.request_id] = record
        return tokens

    def _ended(self, joined: _Joined, row: UsageRow) -> None:
        """Store what a request has used; called once, as its record is closed."""
        run_id = joined.run_id
        if run_id is None:
            return  # nothing was reserved
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
