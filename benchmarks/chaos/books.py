"""Comparison of usage records at the end of a run, and of resources that are still held when idle."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import psycopg
from cluster import list_quotas
from postgres import Postgres

from chaos import judge
from chaos.load import Asked, Tenant
from chaos.stage import NUM_GATEWAYS, Stage

MAX_SHOWN = 20
COMPARED = ("agrees", "total", "differences", "windows", "quarantined")
HELD = ("num_running", "num_waiting", "num_paused", "kv_blocks_used", "host_blocks_used")


async def compare_books(
    stage: Stage,
    postgres: Postgres,
    tenants: Sequence[Tenant],
    asked: Sequence[Asked],
    of_batch: Sequence[str],
    hours: int = 2,
) -> dict[str, Any]:
    """Compare what clients saw, what was booked, and what engines counted."""
    figures = await stage.reconcile(hours)
    async with stage.admin() as client:
        quotas = await list_quotas(client)
    rows = judge.read_rows(postgres.url, [one.ids["tenant"] for one in tenants])
    wrong = judge.one_outcome_each(asked, rows, judge.read_joins(stage), of_batch)
    over = judge.overspent(quotas, asked, rows, tenants)
    return {
        "rows": len(rows),
        "not_one_outcome": len(wrong),
        "overspent": len(over),
        "examples": [*wrong[:MAX_SHOWN], *over[:MAX_SHOWN]],
        "reconciliation": {name: figures.get(name) for name in COMPARED},
        "engines": figures.get("engines"),
    }


async def what_is_left(stage: Stage, postgres: Postgres, waited_s: float) -> dict[str, Any]:
    """Stop the gateways; return what engines still hold, and what is still leased."""
    async with stage.admin() as client:
        found = (await client.get("/engines")).json()["data"]
    engines = [{name: one["load"][name] for name in HELD} if one["load"] else {"not_there": 1} for one in found]
    codes = []
    for number in range(NUM_GATEWAYS):
        stage.held.add(("gateway", number))
        codes.append(await asyncio.to_thread(stage.end, "gateway", number))
    with contextlib.closing(psycopg.connect(postgres.url, autocommit=True)) as connection:
        row = connection.execute("SELECT count(*) FROM quota_leases WHERE granted > settled").fetchone()
        assert row is not None, "a count has a row"
    return {
        "settled_after_s": waited_s,
        "engines": engines,
        "gateways_exit_codes": codes,
        "leases_outstanding": row[0],
    }
