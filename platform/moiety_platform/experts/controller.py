"""`/admin/v1/experts`: the load of experts. The admin router authenticates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated

from litestar import Controller, get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from sqlalchemy import select

from moiety_platform.access.actions import needs
from moiety_platform.access.caller import Caller
from moiety_platform.access.views import PLAN_EXPERTS, READ_EXPERTS
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, NotFound
from moiety_platform.experts.plan_schemas import PlanRequest, PlanView
from moiety_platform.experts.schemas import ExpertReport, ExpertView
from moiety_platform.experts.service import ExpertService
from moiety_platform.experts.sums import LoadSum
from moiety_platform.openapi.described import fails
from moiety_platform.query_parameters import Filter, parse_text, parse_whole, whole
from moiety_platform.tenants.models import Tenant

MAX_MINUTES = 60

Minutes = Annotated[
    str | None,
    whole(
        "Length of the period up to now, in minutes; 0 is the whole time since the engines' start; an hour if not "
        "given.",
        0,
        MAX_MINUTES,
    ),
]


class ExpertController(Controller):
    """Routes of the load of experts."""

    path = "/experts"
    tags = ("experts",)

    @get(opt=needs(READ_EXPERTS))
    async def get_experts(
        self,
        experts: NamedDependency[ExpertService],
        caller: NamedDependency[Caller],
        database: NamedDependency[Database],
        minutes: Minutes = None,
        tenant_id: Filter = None,
        model: Filter = None,
        engine_id: Filter = None,
    ) -> ExpertReport:
        """Return the tokens of each expert of each layer, of all tenants or of one, and the balancedness.

        The counts are a few seconds old. Engines of a model are summed unless one is named.
        """
        window = parse_minutes(minutes)
        given = {"tenant_id": tenant_id, "model": model, "engine_id": engine_id}
        for name, value in given.items():
            parse_text(value, name)
        if caller.tenant_id is not None and (engine_id is not None or tenant_id not in (None, caller.tenant_id)):
            return ExpertReport(window, [])  # other tenants' objects do not exist for them
        loads = await experts.loads(window, tenant_id if caller.tenant_id is None else caller.tenant_id, engine_id)
        sums = [
            (name, one, total)
            for name, one in loads.items()
            if model in (None, name) and (total := one.sum()) is not None
        ]
        names = await names_of(database, {tenant for _, _, total in sums for tenant in total.tokens_of})
        hides = caller.tenant_id is not None
        return ExpertReport(
            window,
            [
                ExpertView.of(name, *(({}, 0) if hides else (one.engines, one.num_silent)), total, names)
                for name, one, total in sums
            ],
        )

    @post("/plan", status_code=200, opt=needs(PLAN_EXPERTS) | fails(404))
    async def plan_experts(self, experts: NamedDependency[ExpertService], data: JSONBody[PlanRequest]) -> PlanView:
        """Return the effect of a placement of replicas over ranks on the load of a model's experts. Changes nothing."""
        loads = await experts.loads(data.minutes, None)
        total = loads[data.model].sum() if data.model in loads else None
        if total is None or not total.tokens:
            raise NotFound(
                f"there is no load of experts of {data.model!r} in these minutes; GET /admin/v1/experts lists the "
                "models, and a load comes with requests"
            )
        async with experts.planning:
            return await asyncio.to_thread(_plan, total, data)


def _plan(load: LoadSum, plan_request: PlanRequest) -> PlanView:
    from moiety_platform.experts.plan import what_if  # noqa: PLC0415  imports numpy, which is slow

    return what_if(load, plan_request)


def parse_minutes(text: str | None) -> int:
    """Return the minutes. Raises BadRequest."""
    minutes = MAX_MINUTES if text is None else parse_whole(text, "minutes")
    if not 0 <= minutes <= MAX_MINUTES:
        raise BadRequest(f"'minutes' must be from 0 to {MAX_MINUTES}; 0 is since the engines' start.", param="minutes")
    return minutes


async def names_of(database: Database, tenant_ids: Iterable[str]) -> dict[str, str]:
    """Return the names of tenants by their ids."""
    statement = select(Tenant.id, Tenant.name).where(Tenant.id.in_(sorted(tenant_ids)))
    async with database.read() as session:
        return {row.id: row.name for row in await session.execute(statement)}
