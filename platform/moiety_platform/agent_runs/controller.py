"""`/admin/v1/runs`: agent runs, and the requests of each. The admin router decides on access."""

from __future__ import annotations

from litestar import Controller, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from moiety_platform.access.actions import needs
from moiety_platform.agent_runs import store as run_store
from moiety_platform.agent_runs.admin_resource import RUNS
from moiety_platform.agent_runs.schemas import RunTrace, RunView, RunViews
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.db.session import Database
from moiety_platform.openapi.described import fails

MAX_LISTED = 1000


class RunController(Controller):
    """Routes of agent runs."""

    path = RUNS.path
    tags = RUNS.tags

    @get(opt=needs(RUNS.read))
    async def list_runs(
        self,
        database: NamedDependency[Database],
        tenant_id: FromQuery[str | None] = None,
        name: FromQuery[str | None] = None,
    ) -> RunViews:
        """List the newest 1000 runs."""
        async with database.read() as session:
            found = await run_store.list_runs(session, tenant_id, name, MAX_LISTED)
            return RunViews([RunView.of(run) for run in found])

    @get("/{run_id:str}", opt=needs(RUNS.read) | fails(404))
    async def get_run(self, database: NamedDependency[Database], run_id: FromPath[str]) -> RunView:
        """Return one run."""
        async with database.read() as session:
            return RunView.of(await run_store.get_run(session, run_id))

    @get("/{run_id:str}/trace", opt=needs(RUNS.read) | fails(404))
    async def get_run_trace(self, database: NamedDependency[Database], run_id: FromPath[str]) -> RunTrace:
        """Return one run with its first 1000 requests in their order."""
        async with database.read() as session:
            run = await run_store.get_run(session, run_id)
            return RunTrace.of(run, await run_store.requests_of(session, run_id))

    @post("/{run_id:str}/stop", status_code=200, opt=needs(RUNS.write) | fails(404))
    async def stop_run(self, store: NamedDependency[AuditedStore], run_id: FromPath[str]) -> RunView:
        """Stop a run: every gateway ends its open requests within seconds, and refuses later ones."""
        async with store.write() as session:
            return RunView.of(await run_store.stop_run(session, run_id, store.clock.now()))
