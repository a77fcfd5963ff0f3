"""Recent traffic of a contract check, read from the store in small parts so that running requests are not slowed down.

The hourly sums show the hours with the most work; only the requests of these hours are read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from sqlalchemy import func, select, tuple_

from moiety_platform.contracts.arrivals import CONTRACT, MAX_REQUESTS, OUTPUT_WEIGHT, Arrival
from moiety_platform.contracts.errors import ContractProblem
from moiety_platform.db.session import Database
from moiety_platform.usage.models import UsageHour, UsageRecord
from moiety_wire.classes import SPECULATIVE_PREFILL

HOUR = timedelta(hours=1)
ROWS_AT_ONCE = 1000
MAX_LENGTHS = 1000  # of a copied tenant's newest requests
PAUSE_S = 0.01


def busiest_hours(work: Mapping[datetime, int], window_s: float) -> tuple[datetime, datetime] | None:
    """Return the clock hours with the most work, as many as a window of `window_s` can touch; None without work."""
    num_hours = math.ceil(window_s / HOUR.total_seconds()) + 1
    sums = {start: sum(work.get(start + n * HOUR, 0) for n in range(num_hours)) for start in sorted(work)}
    if not any(sums.values()):
        return None
    best = max(sums, key=lambda start: sums[start])  # the first of several
    return best, best + num_hours * HOUR


async def hourly_work(
    database: Database, since: datetime, until: datetime, model: str | None, classes: Collection[str]
) -> dict[datetime, int]:
    """Return the work of the requests of each clock hour, in prompt tokens."""
    table = UsageHour
    first = since.replace(minute=0, second=0, microsecond=0)
    tokens = func.sum(table.prompt_tokens), func.sum(table.output_tokens)
    wanted = select(table.hour, *tokens).where(
        table.hour >= first, table.hour < until, table.service_class.in_(classes)
    )
    if model is not None:
        wanted = wanted.where(table.model == model)
    async with database.read() as session:
        rows = (await session.execute(wanted.group_by(table.hour))).all()
    return {hour: int(prompt) + OUTPUT_WEIGHT * int(output) for hour, prompt, output in rows}


async def read_arrivals(
    database: Database, since: datetime, until: datetime, model: str | None, classes: Collection[str]
) -> list[Arrival]:
    """Return the served requests of these classes, with times from `since` on. Raises ContractProblem for too many."""
    row = UsageRecord
    key = row.started_at, row.request_id
    columns = *key, row.tenant_id, row.prompt_tokens, row.output_tokens, row.service_class
    wanted = select(*columns).where(
        *(row.started_at < until, row.endpoint != SPECULATIVE_PREFILL, row.service_class.in_(classes)),
        *(row.prompt_tokens > 0, row.output_tokens > 0),
    )
    if model is not None:
        wanted = wanted.where(row.model == model)
    found: list[Arrival] = []
    position = since, ""
    while True:
        later = wanted.where(tuple_(*key) > position).order_by(*key).limit(ROWS_AT_ONCE)
        async with database.read() as session:
            rows = (await session.execute(later)).all()
        found += [
            Arrival((started_at - since).total_seconds(), tenant, prompt, output, name)
            for started_at, _, tenant, prompt, output, name in rows
        ]
        if len(rows) < ROWS_AT_ONCE:
            return found
        if len(found) > MAX_REQUESTS:
            raise ContractProblem(
                f"more than {MAX_REQUESTS:,} requests were served in the busiest hours; choose one model or other hours"
            )
        position = rows[-1][0], rows[-1][1]
        await asyncio.sleep(PAUSE_S)


async def read_lengths(database: Database, tenant_id: str, since: datetime, model: str | None) -> list[Arrival]:
    """Return a tenant's newest served requests, for their lengths. Raises ContractProblem if there are none."""
    row = UsageRecord
    wanted = select(row.prompt_tokens, row.output_tokens).where(
        *(row.tenant_id == tenant_id, row.started_at >= since, row.endpoint != SPECULATIVE_PREFILL),
        *(row.prompt_tokens > 0, row.output_tokens > 0),
    )
    if model is not None:
        wanted = wanted.where(row.model == model)
    async with database.read() as session:
        rows = (await session.execute(wanted.order_by(row.started_at.desc()).limit(MAX_LENGTHS))).all()
    if not rows:
        raise ContractProblem(
            "the tenant to copy had no served request in this period; choose more hours, or give the input and output "
            "tokens"
        )
    return [Arrival(0.0, CONTRACT, prompt, output, CONTRACT) for prompt, output in rows]
