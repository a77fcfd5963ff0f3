"""Simulations through the admin API: the real simulator, in a process of its own, on rows of a real database."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from sqlalchemy import literal
from tests.usage_rows import make_row

from moiety_engine.scheduling.policies.registry import POLICIES
from moiety_engine.simulator.devices import PRESETS
from moiety_platform.adapters.cache import AdapterCache
from moiety_platform.auth.pepper import PepperRotation
from moiety_platform.bootstrap.administration import Administration
from moiety_platform.clock import ManualClock
from moiety_platform.controllers import with_services
from moiety_platform.db.session import Database
from moiety_platform.document_extraction.text_cache import DocumentTextCache
from moiety_platform.engine_client.base import EngineState
from moiety_platform.live_settings import LiveSettings
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.routing.replicas import Replicas
from moiety_platform.settings import GatewaySettings
from moiety_platform.simulations import store
from moiety_platform.simulations.controller import SimulationController
from moiety_platform.simulations.runner import Simulations
from moiety_platform.usage.store import insert_rows
from moiety_text.segment_cache import SegmentCache
from moiety_wire.engine_load import Load, StepCosts
from moiety_workload import simulations as known

from .conftest import PEPPER, Admin, Demo, admin_app

DEADLINE_S = 60
NICENESS = 1
DEVICE = "a10g-llama2-7b"
on_one_database = pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)  # what is looked at knows none
COSTS = StepCosts(0.01, 0.0001, ((96, 0.0002), (256, 0.0)), 1e-7, 1e-9, 0.05)


@pytest.fixture
def engines() -> list[EngineState]:
    return []


@pytest.fixture
async def simulations(database: Database) -> AsyncIterator[Simulations]:
    made = Simulations(database, limit_s=DEADLINE_S, niceness=NICENESS, beat_s=0.05)
    yield made
    await made.stop()


@pytest.fixture
async def api(
    database: Database, clock: ManualClock, demo: Demo, simulations: Simulations, engines: list[EngineState]
) -> AsyncIterator[Admin]:
    routes = with_services(SimulationController, simulations=simulations, engines=lambda: engines)
    client = Admin(admin_app(database, clock, more=[routes]), demo.admin_key)
    async with client.http:
        yield client


async def serve_some(database: Database, demo: Demo, number: int, **changes: Any) -> None:
    """Requests of the last minutes, by the real clock, which is the database's."""
    start = datetime.now(UTC) - timedelta(seconds=200)
    row: dict[str, Any] = {
        "tenant_id": demo.tenant_id,
        "prompt_tokens": 200,
        "output_tokens": 20,
        "service_class": "standard",
    }
    rows = [
        make_row(f"s-{index}", **{**row, "started_at": start + timedelta(seconds=index), **changes})
        for index in range(number)
    ]
    async with database.write() as session:
        await insert_rows(session, rows)


async def ended(api: Admin, simulation_id: str) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await api.call("GET", f"simulations/{simulation_id}", 200)
            if found["state"] != "running":
                return found
            await asyncio.sleep(0.05)


@on_one_database
async def test_the_last_minutes_are_run_as_they_were_and_as_they_would_be(
    api: Admin, database: Database, demo: Demo
) -> None:
    await serve_some(database, demo, 60)
    async with database.write() as session:
        await insert_rows(session, [make_row("refused", tenant_id=demo.tenant_id, started_at=datetime.now(UTC),
                                             prompt_tokens=0, output_tokens=0, outcome="rejected")])  # fmt: skip
    hurried: dict[str, Any] = {"ttft_s": 0.002, "ttft_per_1k_s": 0}
    asked: dict[str, Any] = {
        "device": DEVICE,
        "minutes": 10,
        "times": 2,
        "replicas": 2,
        "classes": {"standard": hurried},
    }
    made = await api.call("POST", "simulations", 202, json=asked)
    assert (made["state"], made["settings"]["classes"]) == ("running", {"standard": hurried})
    found = await ended(api, made["id"])
    assert (found["state"], found["problem"]) == ("done", None)
    result = found["result"]
    assert (result["device"], result["num_requests"], result["num_unserved"]) == (DEVICE, 60, 1)
    assert result["now"]["classes"]["standard"]["num"] == result["then"]["classes"]["standard"]["num"] == 60
    assert result["now"]["attainment"] == 1.0  # one at a time, for which there is enough time
    assert result["then"]["attainment"] == 0.0  # nothing can be as fast as was asked for
    assert demo.tenant_id not in str(found)
    assert [one["id"] for one in (await api.call("GET", "simulations", 200))["data"]] == [made["id"]]


@on_one_database
async def test_an_engine_is_simulated_as_it_has_learned_to_be(
    api: Admin, database: Database, demo: Demo, engines: list[EngineState]
) -> None:
    await serve_some(database, demo, 5)
    fields = {one.name: 0 for one in msgspec.structs.fields(Load) if one.required} | {
        "engine_id": "e-1",
        "kv_blocks_total": 100,
        "block_size": 16,
    }
    load = Load(**fields, max_batch_tokens=256, max_running=8)
    state: Any = SimpleNamespace(load=load)
    engines.append(state)
    refusal = await api.call("POST", "simulations", 409, json={"engine_id": "e-1"})
    assert refusal["error"]["code"] == "no_step_time_model"
    await api.call("POST", "simulations", 404, json={"engine_id": "e-2"})
    state.load = Load(**fields, max_batch_tokens=256, max_running=8, step_costs=COSTS)
    made = await api.call("POST", "simulations", 202, json={"engine_id": "e-1"})
    found = await ended(api, made["id"])
    assert (found["problem"], found["result"]["device"]) == (None, "as e-1 has learned")
    ttft = found["result"]["now"]["classes"]["standard"]["ttft_s"]["p50"]
    assert ttft == pytest.approx(0.01 + 200 * 0.0001 + 104 * 0.0002, rel=0.1)  # its step, its rows, those past the bend


async def test_one_runs_at_a_time_and_is_cancelled_at_any_gateway(api: Admin, database: Database, demo: Demo) -> None:
    await serve_some(database, demo, 5)
    long: dict[str, Any] = {"device": DEVICE, "generate": "poisson:rate=60,tenants=8,input=2000,output=500"}
    made = await api.call("POST", "simulations", 202, json=long)
    refusal = await api.call("POST", "simulations", 409, json=long)
    assert refusal["error"]["code"] == "simulation_running"
    async with asyncio.timeout(DEADLINE_S):
        while {process.nice() for process in simulators()} != {NICENESS}:  # noqa: ASYNC110 - which it begins without
            await asyncio.sleep(0.05)
    cancelled = await api.call("DELETE", f"simulations/{made['id']}", 200)
    assert cancelled["state"] == "cancelled"
    async with asyncio.timeout(DEADLINE_S):
        while simulators():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
    again = await api.call("POST", "simulations", 202, json={"device": DEVICE})
    await api.call("DELETE", f"simulations/{again['id']}", 200)
    assert (await api.call("GET", f"simulations/{made['id']}", 200))["state"] == "cancelled"


def simulators() -> list[psutil.Process]:
    children = psutil.Process(os.getpid()).children()
    return [child for child in children if "simulate" in child.as_dict(["cmdline"], ad_value=[])["cmdline"]]


@on_one_database
async def test_simulations_without_a_result_report_the_reason(
    api: Admin, database: Database, demo: Demo, simulations: Simulations
) -> None:
    async def problem(**asked: Any) -> str:
        made = await api.call("POST", "simulations", 202, json={"device": DEVICE, **asked})
        found = await ended(api, made["id"])
        assert (found["state"], found["result"]) == ("failed", None)
        return str(found["problem"])

    assert "fewer than two requests" in await problem()
    assert "tides" in await problem(generate="tides:rate=1")
    await serve_some(database, demo, 3, service_class="gold")
    assert "classes that no longer exist: gold" in await problem()
    simulations.limit_s = 0.0
    assert "more than 0 s" in await problem(generate="poisson:rate=60")


async def test_a_simulation_of_a_dead_gateway_blocks_no_other(api: Admin, database: Database) -> None:
    async with database.write() as session:
        await store.claim(session, "sim_dead", {}, lambda: literal(1000))
    found = await api.call("GET", "simulations/sim_dead", 200)
    assert (found["state"], found["problem"]) == ("failed", store.GATEWAY_GONE)
    made = await api.call("POST", "simulations", 202, json={"device": DEVICE})
    await api.call("DELETE", f"simulations/{made['id']}", 200)
    async with database.write() as session:
        assert await store.purge(session) == 1  # the dead one, of long ago
    assert len((await api.call("GET", "simulations", 200))["data"]) == 1


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "device"),
        ({"device": DEVICE, "engine_id": "e"}, "device"),
        ({"device": "b200"}, "device"),
        ({"device": DEVICE, "minutes": 61}, "minutes"),
        ({"device": DEVICE, "times": 0}, "times"),
        ({"device": DEVICE, "policy": "luck"}, "policy"),
        ({"device": DEVICE, "classes": {"gold": {}}}, "classes"),
        ({"device": DEVICE, "classes": {"flex": {"rank": -1}}}, "rank"),
        ({"device": DEVICE, "generate": ""}, "generate"),
        ({"device": DEVICE, "minutes": "5"}, "minutes"),
    ],
)
async def test_invalid_simulations_are_refused(api: Admin, asked: dict[str, Any], param: str) -> None:
    refusal = await api.call("POST", "simulations", 400, json=asked)
    assert refusal["error"]["param"] == param


def test_allowed_device_and_policy_names_are_those_of_the_simulator() -> None:
    assert set(known.DEVICES) == set(PRESETS)
    assert set(known.POLICIES) == set(POLICIES)


async def test_the_patience_with_simulations_is_what_the_settings_say(
    database: Database, objects: ObjectStore, clock: Any
) -> None:
    live = LiveSettings(GatewaySettings())
    stores, replicas = (database, database, objects), Replicas([])
    caches = AdapterCache(database, clock), replicas, DocumentTextCache(0), SegmentCache(0)
    async with Administration(live.now, *stores, (PEPPER, PepperRotation()), clock, *caches) as made:
        made.followed_by(live)
        runners = made.simulations, made.contract_checks
        assert [(one.limit_s, one.niceness) for one in runners] == [(300, 10)] * 2
        await live.change(GatewaySettings(simulation_limit_s=7, simulation_niceness=3))
        assert [(one.limit_s, one.niceness) for one in runners] == [(7, 3)] * 2
