"""Runs and their requests in the store, within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from sqlalchemy import delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.agent_runs.models import MAX_REQUEST_ID_LENGTH, AgentRun, AgentRunRequest
from moiety_platform.agent_runs.terms import RunStatus, RunTerms, deadline_passed, stopped
from moiety_platform.db.dialect import insert_into
from moiety_platform.errors import Conflict, NotFound
from moiety_platform.tenants.checks import new_id
from moiety_platform.usage.row import UsageRow

OPEN = "open"
MAX_SHOWN = 1000  # requests of a run
KEPT = timedelta(days=30)  # after a run's beginning
_PURGED_AT_ONCE = 100


async def join_run(
    session: AsyncSession, tenant_id: str, terms: RunTerms, *, began_at: datetime, now: datetime
) -> AgentRun:
    """Return the run of that name; a new one is created, with `began_at` as its beginning.

    Raises Forbidden where the run is over, or Conflict for other terms.
    """
    deadline_at = None if terms.deadline_s is None else began_at + timedelta(seconds=terms.deadline_s)
    row = {
        "id": new_id("run"),
        "tenant_id": tenant_id,
        "name": terms.name,
        "status": RunStatus.ACTIVE.value,
        "budget_nano": terms.budget_nano,
        "budget_tokens": terms.budget_tokens,
        "deadline_at": deadline_at,
        "deadline_s": terms.deadline_s,
        "keep_s": terms.keep_s,
        "used_nano": 0,
        "used_tokens": 0,
        "num_requests": 0,
        "created_at": began_at,
    }
    await session.execute(insert_into(session, AgentRun).values(row).on_conflict_do_nothing())
    run = await find_run(session, tenant_id, terms, now)
    assert run is not None, "there is one now"
    return run


async def find_run(session: AsyncSession, tenant_id: str, terms: RunTerms, now: datetime) -> AgentRun | None:
    """Return the run of that name, None for a new one. Raises as `join_run`."""
    run = await session.scalar(select(AgentRun).where(AgentRun.tenant_id == tenant_id, AgentRun.name == terms.name))
    if run is None:
        return None
    for field in ("budget_nano", "budget_tokens", "deadline_s", "keep_s"):
        asked = getattr(terms, field)
        if asked is not None and asked != getattr(run, field):
            raise Conflict(
                f"the run {terms.name!r} began with other terms, which cannot be changed; send only its name",
                code="run_terms_differ",
            )
    require_open(run, now)
    return run


def require_open(run: AgentRun, now: datetime) -> None:
    """Raise Forbidden if the run is stopped or its deadline has passed."""
    if run.status != RunStatus.ACTIVE:
        raise stopped(run.name)
    if run.deadline_at is not None and run.deadline_at <= now:
        raise deadline_passed(run.name)


async def lock_run(session: AsyncSession, run_id: str) -> AgentRun:
    """Return the run, locked to the end of the transaction. Raises NotFound."""
    found = await session.scalar(select(AgentRun).where(AgentRun.id == run_id).with_for_update())
    if found is None:
        raise NotFound("There is no run with this id; list them with GET /admin/v1/runs.", param="run_id")
    return found


async def left_of(session: AsyncSession, run: AgentRun, request_id: str) -> tuple[int | None, int | None]:
    """Return what other requests leave of the budgets of a locked run: tokens and nano-dollars, None for no budget.

    A request whose gateway was killed stays open: its reservation, which covers what is billed of it, counts as used.
    """
    if run.budget_tokens is None and run.budget_nano is None:
        return None, None
    others = (
        AgentRunRequest.run_id == run.id,
        AgentRunRequest.request_id != request_id,
        AgentRunRequest.outcome == OPEN,
    )
    sums = select(func.coalesce(func.sum(AgentRunRequest.tokens), 0), func.coalesce(func.sum(AgentRunRequest.nano), 0))
    tokens, nano = (await session.execute(sums.where(*others))).one()
    left_tokens = None if run.budget_tokens is None else run.budget_tokens - run.used_tokens - int(tokens)
    left_nano = None if run.budget_nano is None else run.budget_nano - run.used_nano - int(nano)
    return left_tokens, left_nano


async def end_request(session: AsyncSession, run_id: str, row: UsageRow, now: datetime) -> None:
    """Replace the reservation of a request by what it has used, once."""
    used = {
        "outcome": row.outcome,
        "error_code": row.error_code,
        "model": row.model,
        "tokens": row.prompt_tokens + row.output_tokens,
        "nano": row.cost_nanodollars,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "output_tokens": row.output_tokens,
        "duration_ms": row.duration_ms,
        "ended_at": now,
    }
    run = await session.scalar(select(AgentRun).where(AgentRun.id == run_id).with_for_update())
    request_id = row.request_id[:MAX_REQUEST_ID_LENGTH]
    found = await session.get(AgentRunRequest, (run_id, request_id))
    if run is None or found is None or found.outcome != OPEN:
        return
    for name, value in used.items():
        setattr(found, name, value)
    run.used_tokens, run.used_nano = run.used_tokens + found.tokens, run.used_nano + found.nano


async def get_run(session: AsyncSession, run_id: str) -> AgentRun:
    """Return the run. Raises NotFound."""
    found = await session.get(AgentRun, run_id)
    if found is None:
        raise NotFound("There is no run with this id; list them with GET /admin/v1/runs.", param="run_id")
    return found


async def list_runs(session: AsyncSession, tenant_id: str | None, name: str | None, limit: int) -> Sequence[AgentRun]:
    """Return the newest runs, of one tenant or with one name."""
    wanted = select(AgentRun).order_by(AgentRun.created_at.desc(), AgentRun.id.desc()).limit(limit)
    if tenant_id is not None:
        wanted = wanted.where(AgentRun.tenant_id == tenant_id)
    if name is not None:
        wanted = wanted.where(AgentRun.name == name)
    return (await session.scalars(wanted)).all()


async def requests_of(session: AsyncSession, run_id: str) -> Sequence[AgentRunRequest]:
    """Return the first MAX_SHOWN requests of a run in their order."""
    wanted = select(AgentRunRequest).where(AgentRunRequest.run_id == run_id)
    ordered = wanted.order_by(AgentRunRequest.started_at, AgentRunRequest.request_id).limit(MAX_SHOWN)
    return (await session.scalars(ordered)).all()


async def stop_run(session: AsyncSession, run_id: str, now: datetime) -> AgentRun:
    """Stop a run, if it is not stopped yet. Raises NotFound."""
    run = await lock_run(session, run_id)
    if run.status != RunStatus.STOPPED:
        run.status, run.stopped_at = RunStatus.STOPPED.value, now
        await session.flush()
    return run


async def ended_runs(session: AsyncSession, run_ids: Iterable[str], now: datetime) -> dict[str, AgentRun]:
    """Return those of the runs that are stopped, or whose deadline has passed, by id."""
    is_over = (AgentRun.status == RunStatus.STOPPED.value) | (AgentRun.deadline_at <= now)
    found = await session.scalars(select(AgentRun).where(AgentRun.id.in_(list(run_ids)), is_over))
    return {run.id: run for run in found}


async def purge_runs(session: AsyncSession, before: datetime) -> int:
    """Delete some runs that began before that time, with their requests; return the number of runs.

    A run that was stopped or has had a request since then is kept: its name would begin a run without its limits.
    """
    was_used = exists().where(AgentRunRequest.run_id == AgentRun.id, AgentRunRequest.started_at >= before)
    is_old = AgentRun.created_at < before, or_(AgentRun.stopped_at.is_(None), AgentRun.stopped_at < before), ~was_used
    wanted = select(AgentRun.id).where(*is_old).limit(_PURGED_AT_ONCE)
    ids = list(await session.scalars(wanted))
    if ids:
        await session.execute(delete(AgentRunRequest).where(AgentRunRequest.run_id.in_(ids)))
        await session.execute(delete(AgentRun).where(AgentRun.id.in_(ids)))
    return len(ids)


async def count_request(session: AsyncSession, run_id: str) -> None:
    """Count one more request of a run."""
    await session.execute(update(AgentRun).where(AgentRun.id == run_id).values(num_requests=AgentRun.num_requests + 1))
