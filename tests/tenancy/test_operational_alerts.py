"""Operational alerts: each change of a condition is reported once, whatever the number of gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select
from tests.database_clock import DatabaseClock
from tests.usage_rows import make_row

from moiety_platform.alert_watch.conditions import CONFIRM_MS, LOST_MS
from moiety_platform.alert_watch.observers import EngineObserver, observe_disk, observe_slos
from moiety_platform.alert_watch.watch import AlertThresholds, AlertWatch
from moiety_platform.alerts.controller import AlertController
from moiety_platform.alerts.models import AlertCondition, OperationalAlert
from moiety_platform.bootstrap.pending_work import PendingWorkReader
from moiety_platform.clock import ManualClock
from moiety_platform.controllers import with_services
from moiety_platform.db.session import Database
from moiety_platform.engine_client.base import EngineState
from moiety_platform.live_settings import LiveSettings
from moiety_platform.settings import GatewaySettings
from moiety_platform.usage.store import insert_rows
from moiety_platform.webhooks.models import Webhook, WebhookDelivery

from .conftest import Admin, Demo, admin_app

ENGINE = "tcp://engine:1"
DOWN_AFTER_S = 60.0
ONLY_ENGINES = AlertThresholds(DOWN_AFTER_S, 0.0, 0.0)


@dataclass
class Gateway:
    """The watch of one gateway, and the engines as it sees them."""

    watch: AlertWatch
    states: list[EngineState] = field(default_factory=list)

    def see(self, *, healthy: bool, address: str = ENGINE) -> None:
        reason = "" if healthy else "the connection was lost"
        self.states[:] = [EngineState(address, healthy, reason, None, None, 0)]


@pytest.fixture
def new_gateway(
    database: Database, second: Database, clock: ManualClock, time: DatabaseClock, tmp_path: Path
) -> Callable[..., Gateway]:
    """Return a function that makes the watch of a further gateway."""
    stores = [database, second]

    def make(thresholds: AlertThresholds = ONLY_ENGINES) -> Gateway:
        states: list[EngineState] = []
        store = stores.pop(0) if stores else database
        pending_work = PendingWorkReader(store)
        watch = AlertWatch(
            store, lambda: states, tmp_path, clock, thresholds, now=time.now, has_conditions=pending_work.has_conditions
        )
        return Gateway(watch, states)

    return make


@pytest.fixture
def advance(clock: ManualClock, time: DatabaseClock) -> Callable[[float], None]:
    def both(seconds: float) -> None:
        clock.advance(seconds)
        time.advance(seconds)

    return both


async def stored(database: Database) -> list[OperationalAlert]:
    async with database.read() as session:
        found = await session.scalars(select(OperationalAlert).order_by(OperationalAlert.at, OperationalAlert.type))
        return list(found.all())


async def add_webhook(database: Database, clock: ManualClock) -> None:
    async with database.write() as session:
        session.add(Webhook(id="whk_1", url="https://example.com", created_at=clock.now(), format="json"))


async def test_an_engine_that_is_down_and_up_again_is_reported_once_by_several_gateways(
    new_gateway: Callable[..., Gateway], advance: Callable[[float], None], database: Database, clock: ManualClock
) -> None:
    await add_webhook(database, clock)
    gateways = [new_gateway(), new_gateway()]
    for gateway in gateways:
        gateway.see(healthy=False)
    counts = []
    for _ in range(20):
        counts += await asyncio.gather(*(gateway.watch.round() for gateway in gateways))
        advance(5.0)
    assert sum(counts) == 1
    for gateway in gateways:
        gateway.see(healthy=True)
    counts = await asyncio.gather(*(gateway.watch.round() for gateway in gateways))
    assert sum(counts) == 1
    down, up = await stored(database)
    assert (down.type, down.status, down.severity, down.subject) == ("engine.down", "firing", "critical", ENGINE)
    assert "the connection was lost" in down.summary
    assert (up.type, up.status, up.condition_id) == ("engine.up", "resolved", down.condition_id)
    async with database.read() as session:
        deliveries = (await session.scalars(select(WebhookDelivery.alert_id))).all()
        assert (await session.scalars(select(AlertCondition))).all() == []
    assert sorted(deliveries) == sorted([down.id, up.id])


async def test_an_engine_that_another_gateway_reaches_is_not_reported(
    new_gateway: Callable[..., Gateway], advance: Callable[[float], None], database: Database
) -> None:
    cut_off, other = new_gateway(), new_gateway()
    cut_off.see(healthy=False)
    other.see(healthy=True)
    for _ in range(60):
        await cut_off.watch.round()
        await other.watch.round()
        advance(5.0)
    assert await stored(database) == []


async def test_a_short_interruption_is_not_reported(
    new_gateway: Callable[..., Gateway], advance: Callable[[float], None], database: Database
) -> None:
    gateway = new_gateway()
    for _ in range(4):
        gateway.see(healthy=False)
        for _ in range(11):  # less than the bound
            await gateway.watch.round()
            advance(5.0)
        gateway.see(healthy=True)
        await gateway.watch.round()
    assert await stored(database) == []


async def test_an_engine_that_no_gateway_knows_any_more_is_resolved(
    new_gateway: Callable[..., Gateway], advance: Callable[[float], None], database: Database
) -> None:
    gateway = new_gateway()
    gateway.see(healthy=False)
    await gateway.watch.round()
    advance(DOWN_AFTER_S)
    await gateway.watch.round()
    advance(CONFIRM_MS / 1000)
    assert await gateway.watch.round() == 1
    gateway.states.clear()
    advance(LOST_MS / 1000 - 1)
    assert await gateway.watch.round() == 0
    advance(1)
    assert await gateway.watch.round() == 1
    assert [alert.type for alert in await stored(database)] == ["engine.down", "engine.up"]
    assert "not observed any more" in (await stored(database))[1].summary


async def test_a_disk_is_reported_below_its_bound_and_again_when_it_has_space(
    new_gateway: Callable[..., Gateway], advance: Callable[[float], None], database: Database, tmp_path: Path
) -> None:
    gateway = new_gateway(AlertThresholds(0.0, 100.0, 0.0))  # no disk has so much free space
    await gateway.watch.round()
    advance(CONFIRM_MS / 1000)
    assert await gateway.watch.round() == 1
    gateway.watch.use(GatewaySettings(alert_disk_free_percent=0.000001, alert_engine_down_s=0, alert_slo_burn_rate=0))
    (seen,) = observe_disk(tmp_path, 0.000001)
    if seen.is_bad is False:  # unless the disk of this machine has less than a percent
        assert await gateway.watch.round() == 1
        assert [alert.type for alert in await stored(database)] == ["disk.nearly_full", "disk.recovered"]
    assert observe_disk(tmp_path / "missing", 5.0) == []
    assert observe_disk(tmp_path, 0.0) == []


async def test_live_settings_of_alerts_are_followed(new_gateway: Callable[..., Gateway]) -> None:
    watch = new_gateway().watch
    live = LiveSettings(GatewaySettings())
    watch.followed_by(live)
    await live.change(GatewaySettings(alert_engine_down_s=7, alert_disk_free_percent=8, alert_slo_burn_rate=9))
    assert watch.thresholds == AlertThresholds(7.0, 8.0, 9.0)


async def test_a_class_that_misses_its_slo_over_both_windows_is_reported_until_it_recovers(
    new_gateway: Callable[..., Gateway], advance: Callable[[float], None], database: Database, clock: ManualClock
) -> None:
    async def book(number: int, *, attained: bool, prefix: str) -> None:
        rows = [
            make_row(
                f"{prefix}-{one}", started_at=clock.now(), service_class="standard", slo_attained=attained,
                duration_ms=1.0,
            )
            for one in range(number)
        ]  # fmt: skip
        async with database.write() as session:
            await insert_rows(session, rows)

    gateway = new_gateway(AlertThresholds(0.0, 0.0, 14.4))
    await book(15, attained=False, prefix="few")
    async with database.read() as session:
        assert {one.is_bad for one in await observe_slos(session, clock.now(), 14.4) if one.subject == "standard"} == {
            None
        }
    await book(15, attained=False, prefix="more")
    await gateway.watch.round()
    advance(CONFIRM_MS / 1000)
    assert await gateway.watch.round() == 1
    (fired,) = await stored(database)
    assert (fired.type, fired.subject) == ("slo.burn_rate", "standard")
    assert fired.details["burn_rate_1h"] == pytest.approx(100.0)
    advance(600)
    assert await gateway.watch.round() == 1
    assert (await stored(database))[-1].type == "slo.recovered"
    assert await gateway.watch.round() == 0


def test_an_engine_is_between_the_bounds_until_it_has_been_down_for_long(clock: ManualClock) -> None:
    observer = EngineObserver(clock.monotonic)
    down, up = EngineState("a", False, "lost", None, None, 0), EngineState("a", True, "", None, None, 0)
    assert [one.is_bad for one in observer.observe([down], 10.0)] == [None]
    clock.advance(10.0)
    assert [one.is_bad for one in observer.observe([down], 10.0)] == [True]
    assert [one.is_bad for one in observer.observe([up], 10.0)] == [False]
    assert [one.is_bad for one in observer.observe([msgspec.structs.replace(down, reason="x")], 10.0)] == [None]


async def test_alerts_are_listed_by_those_whom_they_concern(
    new_gateway: Callable[..., Gateway],
    advance: Callable[[float], None],
    database: Database,
    clock: ManualClock,
    demo: Demo,
) -> None:
    gateway = new_gateway()
    gateway.see(healthy=False)
    for _ in range(20):
        await gateway.watch.round()
        advance(5.0)
    owner = Admin(admin_app(database, clock, more=[with_services(AlertController)]), demo.admin_key)
    async with owner.http:
        shown: Any = await owner.call("GET", "alerts", 200)
        new = {"name": "v", "role": "viewer", "tenant_id": demo.tenant_id}
        viewer_key = (await owner.call("POST", "keys", 201, json=new))["secret"]
    assert [(one["group"], one["subject"]) for one in shown["firing"]] == [("engine", ENGINE)]
    assert [one["type"] for one in shown["data"]] == ["engine.down"]
    viewer = Admin(admin_app(database, clock, more=[with_services(AlertController)]), viewer_key)
    async with viewer.http:
        assert await viewer.call("GET", "alerts", 200) == {"firing": [], "data": []}
