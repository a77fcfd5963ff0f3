"""Export of the last minutes' requests as a trace file of the simulator.

It reads in small parts, so that it does not slow down running requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from sqlalchemy import select, tuple_

from moiety_platform.db.session import Database
from moiety_platform.simulations.problems import SimulationProblem
from moiety_platform.tenants.models import Tenant
from moiety_platform.usage.models import UsageRecord
from moiety_wire.classes import SPECULATIVE_PREFILL

ROWS_AT_ONCE = 500
PAUSE_S = 0.01
MAX_REQUESTS = 200_000
HEAD = "arrival_s,tenant,input_tokens,output_tokens,class\n"


@dataclass(slots=True)
class Traffic:
    """Exported traffic. `num_unserved` requests had no lengths, since they were refused or cancelled."""

    num_requests: int = 0
    num_unserved: int = 0
    classes: set[str] = field(default_factory=set)
    tenants: set[str] = field(default_factory=set)


async def write_traffic(database: Database, since: datetime, until: datetime, model: str | None, path: Path) -> Traffic:
    """Write the requests to `path`. Raises SimulationProblem where there are too few, or too many."""
    row, found = UsageRecord, Traffic()
    columns = (row.started_at, row.request_id, row.tenant_id, row.prompt_tokens, row.output_tokens, row.service_class)
    wanted = (
        select(*columns)
        .where(row.started_at < until, row.endpoint != SPECULATIVE_PREFILL)
        .order_by(row.started_at, row.request_id)
    )
    if model is not None:
        wanted = wanted.where(row.model == model)
    position = since, ""
    with path.open("w", encoding="utf-8") as file:
        file.write(HEAD)
        while True:
            async with database.read() as session:
                later = wanted.where(tuple_(row.started_at, row.request_id) > position).limit(ROWS_AT_ONCE)
                rows = (await session.execute(later)).all()
            for started_at, _, tenant, prompt, output, name in rows:
                if prompt > 0 and output > 0:
                    found.num_requests += 1
                    found.classes.add(name)
                    found.tenants.add(tenant)
                    file.write(f"{(started_at - since).total_seconds():.6f},{tenant},{prompt},{output},{name}\n")
                else:
                    found.num_unserved += 1
            if len(rows) < ROWS_AT_ONCE:
                break
            if found.num_requests > MAX_REQUESTS:
                raise SimulationProblem(
                    f"more than {MAX_REQUESTS:,} requests arrived in this period; choose fewer minutes"
                )
            position = rows[-1][0], rows[-1][1]
            await asyncio.sleep(PAUSE_S)
    if found.num_requests < 2:
        raise SimulationProblem(
            "fewer than two requests were served in this period; send more requests, or generate arrivals"
        )
    return found


async def weights_of(database: Database, tenants: set[str]) -> dict[str, float]:
    """Return the weights of these tenants where they are not 1."""
    async with database.read() as session:
        found = await session.execute(select(Tenant.id, Tenant.weight).where(Tenant.weight != 1))
        return {tenant_id: weight for tenant_id, weight in found if tenant_id in tenants}
