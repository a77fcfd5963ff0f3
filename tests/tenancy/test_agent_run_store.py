"""Runs of agents in the database: reservations of killed gateways, and runs that are kept. On both databases."""

from __future__ import annotations

from datetime import timedelta

import pytest

from moiety_platform.agent_runs import store
from moiety_platform.agent_runs.models import AgentRunRequest
from moiety_platform.agent_runs.terms import RunTerms
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import Forbidden

from .conftest import Demo


async def test_the_reservation_of_a_killed_gateway_stays_used(
    database: Database, demo: Demo, clock: ManualClock
) -> None:
    began_at = clock.now()
    async with database.write() as session:
        terms = RunTerms("task", None, 1000)
        run = await store.join_run(session, demo.tenant_id, terms, began_at=began_at, now=began_at)
        opened = {"endpoint": "x", "model": "m", "trace_id": "", "outcome": "open", "started_at": began_at}
        counts = {"tokens": 900, "nano": 0, "prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0}
        session.add(AgentRunRequest(run_id=run.id, request_id="one", tenant_id=demo.tenant_id, **opened, **counts))
    async with database.write() as session:
        run = await store.lock_run(session, run.id)
        assert await store.left_of(session, run, "two") == (100, None)


async def test_a_stopped_run_is_kept_so_that_its_name_begins_no_other(
    database: Database, demo: Demo, clock: ManualClock
) -> None:
    began_at = clock.now()
    later = began_at + store.KEPT + timedelta(seconds=1)
    async with database.write() as session:
        for name in ("stopped", "old"):
            run = await store.join_run(session, demo.tenant_id, RunTerms(name), began_at=began_at, now=began_at)
            if name == "stopped":
                await store.stop_run(session, run.id, later - timedelta(minutes=5))
    async with database.write() as session:
        assert await store.purge_runs(session, later - store.KEPT) == 1
    async with database.write() as session:
        with pytest.raises(Forbidden, match="was stopped"):
            await store.join_run(session, demo.tenant_id, RunTerms("stopped"), began_at=later, now=later)
