"""Engines that join and leave behind one DNS name."""

from __future__ import annotations

from typing import Any

import pytest
import zmq
from tests.wire_submits import wire_submit

from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.scripted.text_model import scripted_text_model
from moiety_engine.server.engine_server import EngineServer
from moiety_engine.server.settings import ServerSettings
from moiety_platform.clock import SystemClock
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_platform.routing.discovery import DnsWatch, resolve
from moiety_platform.routing.replicas import Replicas
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Submit

from .conftest import NewCard, Until

NAME = "dns+tcp://engines.example:5757"


class Zone:
    """The current addresses of the name, and the clients that were made for it."""

    def __init__(self, new_card: NewCard) -> None:
        self.addresses: set[str] | None = set()
        self.made: list[FakeEngineClient] = []
        self._new_card = new_card

    async def resolve(self, host: str, port: int) -> Any:
        assert (host, port) == ("engines.example", 5757)
        if self.addresses is None:
            raise OSError("not known")
        return {f"fake://{address}" for address in self.addresses}

    async def watch(self, replicas: Replicas, addresses: set[str]) -> DnsWatch:
        """Watch the name, which resolves to these addresses."""
        self.addresses = addresses
        watch = DnsWatch(NAME, replicas, self.connect, self.resolve)
        await watch.refresh()
        return watch

    def connect(self, address: str) -> Any:
        self.made.append(FakeEngineClient(self._new_card(address.removeprefix("fake://"))))
        return self.made[-1]


@pytest.fixture
def zone(new_card: NewCard) -> Zone:
    return Zone(new_card)


def submit(request_id: str = "r") -> Submit:
    return wire_submit(request_id, model="tiny")


async def test_engines_join_and_leave_with_the_addresses_of_their_name(zone: Zone) -> None:
    async with Replicas([]) as replicas:
        watch = DnsWatch(NAME, replicas, zone.connect, zone.resolve)
        for addresses in ({"a", "b"}, {"b", "c"}, set(), {"a"}):
            zone.addresses = addresses
            await watch.refresh()
            assert {state.address for state in replicas.states()} == {f"fake://{name}" for name in addresses}
            assert all(state.healthy for state in replicas.states())
        assert [one.address for one in zone.made if one.state.healthy] == ["fake://a"]


async def test_an_engine_removed_from_its_name_finishes_its_requests(zone: Zone) -> None:
    async with Replicas([]) as replicas:
        watch = await zone.watch(replicas, {"a"})
        client, _ = replicas.choose("tiny", STANDARD)
        zone.addresses = {"b"}
        async with client.open(submit()) as stream:
            await watch.refresh()
            assert replicas.choose("tiny", STANDARD)[0] is not client
            stream.extend(100)
            assert len([message async for message in stream.messages()]) == 101
        assert client.state.healthy
        await watch.refresh()
        assert not client.state.healthy


async def test_an_address_that_returns_while_its_engine_drains_keeps_its_connection(zone: Zone) -> None:
    async with Replicas([]) as replicas:
        watch = await zone.watch(replicas, {"a"})
        client, _ = replicas.choose("tiny", STANDARD)
        async with client.open(submit()):
            for zone.addresses in (set(), {"a"}):
                await watch.refresh()
        assert replicas.choose("tiny", STANDARD)[0] is client


async def test_engines_that_are_listed_by_their_address_do_not_leave_with_a_name(zone: Zone) -> None:
    listed = zone.connect("fake://a")
    async with Replicas([listed]) as replicas:
        watch = DnsWatch(NAME, replicas, zone.connect, zone.resolve)
        for zone.addresses in ({"a", "b"}, set()):
            await watch.refresh()
        assert [state.address for state in replicas.states()] == ["fake://a"]
        assert listed.state.healthy


async def test_an_engine_that_is_listed_no_more_stays_if_it_is_its_names(zone: Zone) -> None:
    async with Replicas([]) as replicas:
        watch = await zone.watch(replicas, {"a"})
        replicas.admit(zone.connect("fake://a"))  # listed by its address, too
        watch.release_engine("fake://a")
        assert watch.take_over_engine("fake://a") and not watch.take_over_engine("fake://b")
        zone.addresses = {"b"}
        await watch.refresh()
        assert [state.address for state in replicas.states()] == ["fake://b"]
        replicas.retire("fake://a")  # gone already


async def test_an_unresolvable_name_keeps_known_engines_and_is_reported_without_any(zone: Zone) -> None:
    async with Replicas([]) as replicas:
        watch = DnsWatch(NAME, replicas, zone.connect, zone.resolve)
        zone.addresses = None
        await watch.refresh()
        assert replicas.why_not_ready() == [f"engines {NAME}: the name cannot be resolved: not known"]
        zone.addresses = {"a"}
        await watch.refresh()
        assert replicas.why_not_ready() == []
        zone.addresses = None
        await watch.refresh()
        assert [state.address for state in replicas.states()] == ["fake://a"]


async def test_a_real_name_leads_to_a_real_engine(until: Until) -> None:
    context = zmq.Context()
    front = EngineServer(
        ServerSettings(model="scripted", listen="tcp://127.0.0.1:0", heartbeat_interval_s=0.05),
        "engine-1",
        scripted_text_model(),
        ScriptedCore(Script()),
        context,
    )
    await front.start()
    port = int(front.address.rpartition(":")[2])
    assert await resolve("localhost", port) == {f"tcp://127.0.0.1:{port}"}
    try:
        async with Replicas([]) as replicas:
            clock = SystemClock()
            name = f"dns+tcp://localhost:{port}"
            await DnsWatch(name, replicas, lambda address: ZmqEngineClient(address, context, clock)).refresh()
            await until(lambda: not replicas.why_not_ready())
            assert replicas.card("scripted", None).engine_id == "engine-1"
    finally:
        await front.close()
        context.destroy(linger=0)


async def test_a_retired_engine_stays_connected_until_it_is_closed(zone: Zone) -> None:
    async with Replicas([zone.connect("fake://a"), zone.connect("fake://b")]) as replicas:
        replicas.retire("fake://a")
        assert [client.address for client in replicas.clients()] == ["fake://b"]
        assert {client.address for client in replicas.connected()} == {"fake://a", "fake://b"}
        await replicas.close_retired()
        assert [client.address for client in replicas.connected()] == ["fake://b"]
