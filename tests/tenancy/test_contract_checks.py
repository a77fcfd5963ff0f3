"""Contract checks through the admin API: the real simulator, in a process of its own, on rows of a real database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.usage_rows import make_row

from moiety_platform.clock import ManualClock
from moiety_platform.contracts.arrivals import CONTRACT
from moiety_platform.contracts.controller import ContractCheckController
from moiety_platform.contracts.runner import STOPPED, ContractChecks
from moiety_platform.contracts.traffic import HOUR, busiest_hours
from moiety_platform.controllers import with_services
from moiety_platform.db.session import Database
from moiety_platform.engine_client.base import EngineState
from moiety_platform.usage.store import insert_rows
from moiety_wire.engine_load import Load, StepCosts

from .conftest import Admin, Demo, admin_app

LIMIT_S = 300  # several processes, which share the processor with other tests
DEVICE = "a10g-llama2-7b"
SMALL: dict[str, Any] = {"requests_per_minute": 6, "input_tokens": 512, "output_tokens": 128, "window_s": 60}
GIVEN = {**SMALL, "device": DEVICE}
MIDNIGHT = datetime(2026, 3, 1, tzinfo=UTC)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def engines() -> list[EngineState]:
    return []


@pytest.fixture
async def checks(database: Database) -> AsyncIterator[ContractChecks]:
    made = ContractChecks(database, limit_s=LIMIT_S, niceness=0, beat_s=0.05)
    yield made
    await made.stop()


@pytest.fixture
async def api(
    database: Database, clock: ManualClock, demo: Demo, checks: ContractChecks, engines: list[EngineState]
) -> AsyncIterator[Admin]:
    routes = with_services(ContractCheckController, contract_checks=checks, engines=lambda: engines)
    client = Admin(admin_app(database, clock, more=[routes]), demo.admin_key)
    async with client.http:
        yield client


async def serve_some(database: Database, demo: Demo, number: int, **changes: Any) -> datetime:
    """Store requests of the same clock hour, one in two seconds; return the time of the first."""
    start = datetime.now(UTC).replace(minute=0, second=1, microsecond=0) - timedelta(hours=3)
    row = {"tenant_id": demo.tenant_id, "prompt_tokens": 200, "output_tokens": 20, "service_class": "standard"}
    rows = [
        make_row(f"s-{index}", **{**row, "started_at": start + timedelta(seconds=2 * index), **changes})
        for index in range(number)
    ]
    async with database.write() as session:
        await insert_rows(session, rows)
    return start


async def test_a_small_tenant_is_accepted_beside_the_recent_traffic(api: Admin, database: Database, demo: Demo) -> None:
    start = await serve_some(database, demo, 30)
    found = await api.call("POST", "contract-checks", 200, json=GIVEN)
    assert (found["state"], found["problem"], found["verdict"]) == ("done", None, "accepted"), found
    assert (found["num_requests"], found["device"], found["replicas"]) == (30, DEVICE, 1)
    assert datetime.fromisoformat(found["window_since"]) == start
    assert found["num_contract_requests"] > 0 and found["before"]["standard"] >= 0.99
    assert [(run["service_class"], run["replicas"], run["missed"]) for run in found["runs"]] == [("standard", 1, [])]
    assert (found["burst_factor"], found["burst"]["missed"], found["burst"]["replicas"]) == (1.5, [], 1)
    without = await api.call("POST", "contract-checks", 200, json=GIVEN | {"burst_factor": 1})
    assert (without["verdict"], without["burst"]) == ("accepted", None)
    assert found["terms"]["requests_per_minute"] == 6
    assert demo.tenant_id not in json.dumps(found)


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_a_large_tenant_is_told_what_to_add(api: Admin) -> None:
    """Without recent traffic, and on the step times of an engine that serves one request in about 0.1 s."""
    large = {**GIVEN, "requests_per_minute": 400, "max_replicas": 8}
    found = await api.call("POST", "contract-checks", 200, json=large)
    assert (found["verdict"], found["window_since"], found["num_requests"]) == ("needs_more", None, 0), found
    assert found["runs"][0]["missed"] == [CONTRACT]
    assert found["replicas_needed"] is not None or found["classes"]
    if found["replicas_needed"] is not None:
        assert 1 < found["replicas_needed"] <= 8


async def test_a_tenant_can_be_copied(api: Admin, database: Database, demo: Demo, engines: list[EngineState]) -> None:
    """Its weight, its limits per minute, and the lengths of its own requests; its other limits do not count."""
    await serve_some(database, demo, 5, prompt_tokens=64, output_tokens=8)
    copied = {"copy_tenant_id": demo.tenant_id, "window_s": 60, "device": DEVICE}
    refusal = await api.call("POST", "contract-checks", 400, json=copied)
    assert "has no such limit" in refusal["error"]["message"]
    await api.call("PATCH", f"tenants/{demo.tenant_id}", 200, json={"weight": 2.5})
    for kind, cap in (("requests_per_minute", 30), ("tokens_per_minute", 700), ("tokens_per_day", 5)):
        limit = {"level": "tenant", "scope_id": demo.tenant_id, "kind": kind, "cap": cap}
        await api.call("PUT", "quotas", 200, json=limit)
    found = await api.call("POST", "contract-checks", 200, json=copied)
    assert (found["state"], found["terms"]["weight"]) == ("done", 2.5), found
    limits = found["terms"]["requests_per_minute"], found["terms"]["tokens_per_minute"]
    assert (limits, found["terms"]["service_class"]) == ((30, 700), "standard")
    assert 1 <= found["num_contract_requests"] < 30  # 700 tokens a minute are ten requests of 72
    given = await api.call("POST", "contract-checks", 200, json={**copied, "tokens_per_minute": 72, "seed": 3})
    assert given["num_contract_requests"] < 10
    await api.call("POST", "contract-checks", 404, json={**copied, "copy_tenant_id": "ten_" + "a" * 20})


async def test_step_times_are_those_of_a_running_engine(
    api: Admin, database: Database, demo: Demo, engines: list[EngineState]
) -> None:
    refusal = await api.call("POST", "contract-checks", 409, json=SMALL)
    assert refusal["error"]["code"] == "no_step_time_model"
    fields = {one.name: 0 for one in msgspec.structs.fields(Load) if one.required} | {"engine_id": "e-1"}
    fields |= {"kv_blocks_total": 1000, "block_size": 16, "max_batch_tokens": 256, "max_running": 8}
    load = Load(**fields, step_costs=StepCosts(0.01, 0.0001, ((96, 0.0002),), 1e-7, 1e-9, 0.05))
    for healthy in (True, True, False):
        state: Any = SimpleNamespace(load=load, healthy=healthy, card=SimpleNamespace(model="tiny"))
        engines.append(state)
    found = await api.call("POST", "contract-checks", 200, json=SMALL)
    assert (found["state"], found["device"], found["replicas"]) == ("done", "as e-1 has learned", 2), found
    await api.call("POST", "contract-checks", 409, json={**SMALL, "model": "another"})
    await api.call("POST", "contract-checks", 404, json={**SMALL, "engine_id": "e-2"})


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_a_check_without_a_result_reports_the_reason(api: Admin, checks: ContractChecks) -> None:
    async def problem(**changes: Any) -> str:
        found = await api.call("POST", "contract-checks", 200, json={**GIVEN, **changes})
        assert (found["state"], found["verdict"]) == ("failed", None)
        return str(found["problem"])

    assert "give the input tokens" in await problem(input_tokens=None)
    assert "longer window" in await problem(requests_per_minute=0.001)
    assert "more than 200,000 requests" in await problem(requests_per_minute=1e6)
    checks.limit_s = 0.001
    assert "it took more than 0 s" in await problem()


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_one_check_runs_at_a_time_and_ends_with_the_gateway(api: Admin, checks: ContractChecks) -> None:
    long = {**GIVEN, "requests_per_minute": 3000, "window_s": 3600}
    first = asyncio.create_task(api.call("POST", "contract-checks", 200, json=long))
    async with asyncio.timeout(LIMIT_S):
        while not checks.is_running:
            assert not first.done(), first.result()
            await asyncio.sleep(0.01)
    refusal = await api.call("POST", "contract-checks", 409, json=GIVEN)
    assert refusal["error"]["code"] == "contract_check_running"
    await checks.stop()
    found = await first
    assert (found["state"], found["problem"]) == ("failed", STOPPED)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"requests_per_minute": None}, "requests_per_minute"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"requests_per_minute": 1e7}, "requests_per_minute"),
        ({"service_class": "gold"}, "service_class"),
        ({"input_tokens": 0}, "input_tokens"),
        ({"weight": -1}, "weight"),
        ({"hours": 745}, "hours"),
        ({"window_s": 59}, "window_s"),
        ({"replicas": 0}, "replicas"),
        ({"max_replicas": 1001}, "max_replicas"),
        ({"required": 1.1}, "required"),
        ({"device": "b200"}, "device"),
        ({"engine_id": "e"}, "device"),
        ({"hours": "5"}, "hours"),
    ],
)
@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_invalid_checks_are_refused(api: Admin, changes: dict[str, Any], param: str) -> None:
    refusal = await api.call("POST", "contract-checks", 400, json={**GIVEN, **changes})
    assert refusal["error"]["param"] == param


@given(st.dictionaries(st.integers(0, 40), st.integers(0, 100)), st.integers(60, 36_000))
def test_no_other_hours_that_a_window_can_touch_have_more_work(found: dict[int, int], window_s: int) -> None:
    work = {MIDNIGHT + hour * HOUR: tokens for hour, tokens in found.items()}
    hours = busiest_hours(work, window_s)
    if not any(work.values()):
        assert hours is None
        return
    assert hours is not None
    start, end = hours
    assert end - start >= timedelta(seconds=window_s) + HOUR or window_s % 3600 == 0

    def total(first: datetime) -> int:
        return sum(tokens for hour, tokens in work.items() if first <= hour < first + (end - start))

    assert total(start) == max(total(hour) for hour in work)


async def test_only_served_requests_of_the_model_and_of_existing_classes_count(
    api: Admin, database: Database, demo: Demo
) -> None:
    await serve_some(database, demo, 3, model="tiny")
    rows: Sequence[tuple[str, dict[str, Any]]] = (
        ("other", {"model": "other"}),
        ("old", {"model": "tiny", "service_class": "gold"}),
        ("refused", {"model": "tiny", "prompt_tokens": 0, "output_tokens": 0, "outcome": "rejected"}),
    )
    at = datetime.now(UTC) - timedelta(minutes=5)
    async with database.write() as session:
        await insert_rows(
            session,
            [
                make_row(name, **{"tenant_id": demo.tenant_id, "started_at": at, "service_class": "standard", **fields})
                for name, fields in rows
            ],
        )
    found = await api.call("POST", "contract-checks", 200, json={**GIVEN, "model": "tiny"})
    assert (found["state"], found["num_requests"]) == ("done", 3), found
