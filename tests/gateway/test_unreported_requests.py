"""Requests that an engine's newest load report does not contain, as the gateway that sent them counts them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import zmq
from tests.scripted_servers import running_server
from tests.wire_submits import wire_submit

from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_platform.clock import ManualClock
from moiety_platform.engine_client.session import REPORT_DELAY_S
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_wire.messages import Stopping

from .conftest import Until

ENDLESS = wire_submit("r", stopping=Stopping(max_tokens=9, ignore_eos=True), credit_tokens=1)
SLOW = Script(tokens=(97,), step_delay_s=600.0)  # admits nothing during a test


@asynccontextmanager
async def connected(script: Script, clock: ManualClock, until: Until) -> AsyncIterator[ZmqEngineClient]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        async with running_server(context, ScriptedCore(script)) as server:
            client = ZmqEngineClient(server.address, context, clock)
            await client.start()
            try:
                await until(lambda: client.state.load is not None)
                yield client
            finally:
                await client.close()


async def test_a_request_is_unreported_until_a_report_that_can_contain_it(until: Until) -> None:
    clock = ManualClock()
    async with connected(SLOW, clock, until) as client:
        session = client._session
        assert session is not None and session.load is not None
        async with client.open(ENDLESS):
            assert client.state.num_unreported == 1
            session._take(msgspec.structs.replace(session.load, num_running=5))  # requests of another gateway
            assert client.state.num_unreported == 1, "it was sent a moment before, and may not have arrived"
            clock.advance(REPORT_DELAY_S)
            session._heard_at_s = clock.monotonic()
            session._take(session.load)
            assert client.state.num_unreported == 0
            async with client.open(msgspec.structs.replace(ENDLESS, request_id="s")):
                assert (client.state.num_unreported, client.state.num_inflight) == (1, 2)


async def test_a_report_after_the_admission_contains_the_request(until: Until) -> None:
    async with connected(Script(tokens=(97,)), ManualClock(), until) as client:
        session = client._session
        assert session is not None and session.load is not None
        async with client.open(ENDLESS) as stream:
            await until(lambda: stream.accepted is not None)
            session._take(session.load)
            assert client.state.num_unreported == 0


async def test_a_request_that_has_ended_is_not_counted(until: Until) -> None:
    async with connected(Script(tokens=(97,)), ManualClock(), until) as client:
        async with client.open(msgspec.structs.replace(ENDLESS, stopping=Stopping(max_tokens=1))) as stream:
            await until(lambda: stream.ended)
        assert (client.state.num_unreported, client.state.num_inflight) == (0, 0)
