"""A gateway forwards the service of tenants between the engines of a model: what it sends, and over real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq
from hypothesis import given
from hypothesis import strategies as st
from tests.scripted_servers import running_server

from moiety_engine.messages import CoreFleetService
from moiety_engine.scheduling.fairness.remote_service import RemoteService
from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_platform.clock import SystemClock
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_platform.routing.service_exchange import ServiceExchange
from moiety_wire.codec import decode_to_engine, encode
from moiety_wire.fleet_service import FleetService, ReplicaService, ServiceReport, TenantService

from .cards import make_card
from .conftest import Until


def _report(**sums: float) -> ServiceReport:
    """Return a report in which the account id of a tenant is the code of its name's letter."""
    tenants = [TenantService(ord(name), 1, name, service) for name, service in sums.items()]
    return ServiceReport("vtc", max((one.account_id for one in tenants), default=0), tenants)


async def _engine(engine_id: str, model: str = "m", *, exchanges: bool = True) -> FakeEngineClient:
    card = msgspec.structs.replace(make_card(), engine_id=engine_id, model=model, exchanges_service=exchanges)
    engine = FakeEngineClient(card)
    await engine.start()
    return engine


def _sums(message: FleetService) -> dict[str, dict[str, float]]:
    return {one.engine_id: {t.tenant_id: t.service for t in one.report.tenants} for one in message.replicas}


async def test_each_engine_gets_the_reports_of_the_others_of_its_model_and_only_what_changed() -> None:
    first, second, other_model = await _engine("1"), await _engine("2"), await _engine("3", "another")
    silent = await _engine("4", exchanges=False)
    first.tenant_service, second.tenant_service = _report(a=10.0, b=5.0), _report(a=7.0)
    other_model.tenant_service = silent.tenant_service = _report(a=99.0)
    exchange = ServiceExchange(lambda: [first, second, other_model, silent])
    await exchange.round()
    assert [_sums(one) for one in first.fleet_services] == [{"2": {"a": 7.0}}]
    assert [_sums(one) for one in second.fleet_services] == [{"1": {"a": 10.0, "b": 5.0}}]
    assert not other_model.fleet_services
    assert not silent.fleet_services
    first.tenant_service = _report(a=11.0, b=5.0)
    await exchange.round()
    assert _sums(first.fleet_services[-1]) == {"2": {}}, "a replica without news is named, so that it is not forgotten"
    assert _sums(second.fleet_services[-1]) == {"1": {"a": 11.0}}


async def test_all_is_sent_again_after_a_reconnection() -> None:
    first, second = await _engine("1"), await _engine("2")
    first.tenant_service = _report(a=10.0)
    exchange = ServiceExchange(lambda: [first, second])
    await exchange.round()
    await second.close()
    await exchange.round()
    await second.start()
    await exchange.round()
    assert [_sums(one) for one in second.fleet_services] == [{"1": {"a": 10.0}}, {"1": {"a": 10.0}}]


async def test_a_message_is_bounded_and_the_rest_follows() -> None:
    first, second = await _engine("1"), await _engine("2")
    first.tenant_service = _report(a=10.0, b=30.0, c=20.0)
    exchange = ServiceExchange(lambda: [first, second], max_tenants=2)
    await exchange.round()
    await exchange.round()
    assert [_sums(one) for one in second.fleet_services] == [{"1": {"b": 30.0, "c": 20.0}}, {"1": {"a": 10.0}}]


async def test_a_stale_report_is_not_sent() -> None:
    first, second = await _engine("1"), await _engine("2")
    first.tenant_service, first.load_age_s = _report(a=10.0), 60.0
    await ServiceExchange(lambda: [first, second]).round()
    assert not second.fleet_services


@given(
    st.lists(
        st.tuples(st.sampled_from(["serve", "one", "other", "replace"]), st.sampled_from("abc"), st.integers(1, 50)),
        max_size=40,
    )
)
def test_several_gateways_that_come_and_go_count_all_service_once(steps: list[tuple[str, str, int]]) -> None:
    import asyncio

    async def run() -> None:
        first, second = await _engine("1"), await _engine("2")
        served: dict[str, float] = {}
        first.tenant_service = ServiceReport("vtc", 0)
        gateways = {"one": ServiceExchange(lambda: [first, second]), "other": ServiceExchange(lambda: [first, second])}
        await gateways["one"].round()
        for action, tenant, amount in steps:
            if action == "serve":
                served[tenant] = served.get(tenant, 0.0) + amount
                first.tenant_service = _report(**served)
            elif action == "replace":
                gateways["one"] = ServiceExchange(lambda: [first, second])
            else:
                await gateways[action].round()
        await gateways["other"].round()
        remote = RemoteService("vtc", 1.0)
        for number, message in enumerate(second.fleet_services):
            (received,) = decode_to_engine(encode(message))
            assert isinstance(received, FleetService)
            remote.merge(received.replicas, 0.1 * number)
        assert remote.received_total == sum(served.values())

    asyncio.run(run())


class _Core(ScriptedCore):
    """The scripted core, and the service on other replicas that it was sent."""

    def __init__(self) -> None:
        super().__init__(Script(tokens=tuple(b"abc")))
        self.received: list[ReplicaService] = []

    def send(self, commands: Any) -> None:
        for command in commands:
            if isinstance(command, CoreFleetService):
                self.received += command.replicas
        super().send(commands)


async def test_an_engine_gets_the_reports_of_others_and_never_its_own(until: Until, tmp_path: Path) -> None:
    context, listen, core = zmq.Context(), f"ipc://{tmp_path}/engine", _Core()
    client = ZmqEngineClient(listen, context, SystemClock())
    mine, other = ReplicaService("engine-1", _report(a=1.0)), ReplicaService("engine-2", _report(b=2.0))
    try:
        client.send_fleet_service(FleetService([other]))  # nobody is there yet
        await client.start()
        async with running_server(context, core, listen, "engine-1") as server:
            await until(lambda: client.state.healthy)
            client.send_fleet_service(FleetService([other]))  # its card does not say that it takes any
            assert server.card is not None
            session = client._session
            assert session is not None
            assert session.card is not None
            session.card = msgspec.structs.replace(session.card, exchanges_service=True)
            client.send_fleet_service(FleetService([mine, other]))
            await until(lambda: core.received == [other])
    finally:
        await client.close()
        context.destroy(linger=0)
