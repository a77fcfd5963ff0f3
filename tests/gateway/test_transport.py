"""The ZeroMQ client against the engine server, with a scripted core behind it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.scripted_servers import running_server
from tests.wire_submits import wire_submit

from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.scripted.script import ScriptedDecision as ScriptedVerdict
from moiety_engine.server.router import MAX_MESSAGE_BYTES
from moiety_platform.clock import ManualClock, SystemClock
from moiety_platform.engine_client.curve import CurveKeys
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_platform.errors import BadRequest, EngineFailed, Overloaded, Unavailable
from moiety_wire.classes import BATCH, FLEX
from moiety_wire.codec import decode_to_engine, encode
from moiety_wire.engine_load import Load
from moiety_wire.images import ImageInput
from moiety_wire.messages import (
    SILENCE_LIMIT_S,
    Finished,
    FinishReason,
    Heartbeat,
    Hello,
    ModelCard,
    Stopping,
    Submit,
    Tokens,
)
from moiety_wire.trace_events import Reason

from .conftest import Until

Connected = Callable[..., AbstractAsyncContextManager[ZmqEngineClient]]
SCRIPT = Script(tokens=tuple(b"abc"))


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@asynccontextmanager
async def running_front(
    context: zmq.Context[Any],
    listen: str = "tcp://127.0.0.1:0",
    engine_id: str = "engine-1",
    script: Any = SCRIPT,
    **settings: Any,
) -> AsyncIterator[Any]:
    async with running_server(context, ScriptedCore(script), listen, engine_id, **settings) as front:
        yield front


@pytest.fixture
def connected(context: zmq.Context[Any], until: Until) -> Connected:
    @asynccontextmanager
    async def connect(address: str, curve: Any = None, wait: bool = True) -> AsyncIterator[ZmqEngineClient]:
        client = ZmqEngineClient(address, context, SystemClock(), curve)
        await client.start()
        try:
            if wait:
                await until(lambda: client.state.healthy)
            yield client
        finally:
            await client.close()

    return connect


def submit(
    request_id: str = "r", max_tokens: int = 5, credit_tokens: int = 5, prompt: bytes = b"hello", **changes: Any
) -> Submit:
    stopping = Stopping(max_tokens=max_tokens, ignore_eos=True)
    return wire_submit(request_id, prompt_ids=list(prompt), stopping=stopping, credit_tokens=credit_tokens, **changes)


async def test_verdicts_of_the_core_cross_the_wire(
    context: zmq.Context[Any], connected: Connected, until: Until
) -> None:
    verdicts = (
        ScriptedVerdict(tenant_id="t", service_class="standard", reason=Reason.KV_PEAK, downgrades=True),
        ScriptedVerdict(service_class="flex", reason=Reason.SHED, retry_after_s=2.5),
    )
    script = msgspec.structs.replace(SCRIPT, verdicts=verdicts)
    async with running_front(context, script=script) as front, connected(front.address) as client:
        async with client.open(submit(fallback=BATCH)) as stream:
            assert [message async for message in stream.messages()][-1].served_class == "batch"
            assert (stream.accepted.served_class, stream.accepted.reason) == ("batch", Reason.KV_PEAK)
        async with client.open(submit("r2", service=FLEX)) as stream:
            with pytest.raises(Overloaded) as caught:
                await stream.inbox.get()
            assert (caught.value.reason, caught.value.retry_after_s) == (Reason.SHED, 2.5)
        await until(lambda: client.state.class_load("flex") is not None)
        assert client.state.class_load("flex").rejected_total == {"shed": 1}
        assert client.state.class_load("nothing") is None


async def test_engines_of_one_model_share_its_tokenizer_so_that_nothing_compares_megabytes(
    context: zmq.Context[Any], connected: Connected
) -> None:
    async with (
        running_front(context) as one,
        running_front(context, engine_id="engine-2") as other,
        connected(one.address) as first,
        connected(other.address) as second,
    ):
        assert first.state.card.tokenizer_json is second.state.card.tokenizer_json


async def test_a_request_is_answered_to_its_end(context: zmq.Context[Any], connected: Connected, until: Until) -> None:
    async with running_front(context) as front, connected(front.address) as client:
        assert client.state.card.model == "scripted"
        async with client.open(submit()) as stream:
            messages = [message async for message in stream.messages()]
        text = "".join(message.text for message in messages)
        assert text == "abcab"
        assert isinstance(messages[-1], Finished)
        assert (messages[-1].reason, stream.num_output_tokens) == (FinishReason.LENGTH, 5)
        await until(lambda: client.state.load is not None and client.state.load.requests_total == 1)
        assert client.state.num_inflight == 0


async def test_a_stream_pauses_at_its_credit_and_continues_when_extended(
    context: zmq.Context[Any], connected: Connected, until: Until
) -> None:
    async with running_front(context) as front, connected(front.address) as client:
        async with client.open(submit(max_tokens=100, credit_tokens=3)) as stream:
            await until(lambda: stream.num_output_tokens == 3)
            await until(lambda: client.state.load.num_paused == 1)
            stream.extend(100)
            messages = [message async for message in stream.messages()]
        assert sum(len(message.token_ids) for message in messages if isinstance(message, Tokens)) == 100


async def test_leaving_a_stream_aborts_it_and_waits_for_the_exact_count(
    context: zmq.Context[Any], connected: Connected
) -> None:
    async with running_front(context) as front, connected(front.address) as client:
        async with client.open(submit(max_tokens=5000, credit_tokens=50)) as stream:
            await stream.inbox.get()
        assert stream.finished.reason is FinishReason.ABORT
        assert stream.num_output_tokens == stream.finished.num_output_tokens <= 50
        assert front.num_open == 0


async def test_leaving_waits_for_the_count_even_when_cancelled_again(
    context: zmq.Context[Any], connected: Connected
) -> None:
    async with running_front(context) as front, connected(front.address) as client:
        opened = asyncio.Event()
        streams = []

        async def hold() -> None:
            async with client.open(submit(max_tokens=5000, credit_tokens=50)) as stream:
                streams.append(stream)
                opened.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(hold())
        await opened.wait()
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        assert task.cancelled()
        assert streams[0].finished is not None


async def test_a_refused_request_raises_its_error(context: zmq.Context[Any], connected: Connected) -> None:
    async with (
        running_front(context) as front,
        connected(front.address) as client,
        client.open(submit(prompt=b"")) as stream,
    ):
        with pytest.raises(BadRequest, match="no tokens"):
            await stream.inbox.get()


async def test_without_an_engine_open_raises_unavailable(
    connected: Connected,
) -> None:
    async with connected("tcp://127.0.0.1:9", wait=False) as client:
        assert client.state.reason.startswith("not connected yet")
        with pytest.raises(Unavailable):
            async with client.open(submit()):
                pass


async def test_an_engine_that_ends_fails_its_streams_at_once_and_its_successor_is_found(
    context: zmq.Context[Any], connected: Connected, until: Until
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_front(context))
        client = await stack.enter_async_context(connected(first.address))
        async with client.open(submit(max_tokens=500, credit_tokens=5)) as stream:
            await until(lambda: stream.num_output_tokens == 5)
            await first.close()
            with pytest.raises(EngineFailed):
                while True:
                    await stream.inbox.get()
        await until(lambda: not client.state.healthy)
        assert client.state.reason == "the connection dropped"  # and not silence, noticed later
        assert client.state.card.engine_id == "engine-1"  # what it served is still known
        await stack.enter_async_context(running_front(context, first.address, "engine-2"))
        await until(lambda: client.state.healthy)
        assert client.state.card.engine_id == "engine-2"
        async with client.open(submit()) as stream:
            assert [message async for message in stream.messages()]


async def test_a_link_with_curve_keys_works_and_one_without_gets_nowhere(
    context: zmq.Context[Any], connected: Connected
) -> None:
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    async with running_front(context, curve_secret_key=server_secret) as front:
        curve = CurveKeys(server_public, client_public, client_secret)
        async with connected(front.address, wait=False) as stranger:
            async with connected(front.address, curve) as client, client.open(submit()) as stream:
                assert [message async for message in stream.messages()]
            assert not stranger.state.healthy


async def test_a_gateway_is_served_again_once_its_key_is_back_on_the_list(
    context: zmq.Context[Any], connected: Connected, until: Until, tmp_path: Path
) -> None:
    server_public, server_secret = zmq.curve_keypair()
    own, other = zmq.curve_keypair(), zmq.curve_keypair()
    file = tmp_path / "gateways"

    def let_in(*lines: Any) -> None:
        fresh = tmp_path / "fresh"
        fresh.write_bytes(b"\n".join(lines) + b"\n")
        fresh.replace(file)

    let_in(own[0], other[0])
    async with (
        running_front(context, curve_secret_key=server_secret, gateway_keys_file=file) as front,
        connected(front.address, CurveKeys(server_public, *own)) as client,
    ):
        async with client.open(submit(max_tokens=500, credit_tokens=5)) as stream:
            await until(lambda: stream.num_output_tokens == 5)
            let_in(other[0])
            with pytest.raises(EngineFailed):
                while True:
                    await stream.inbox.get()
        await until(lambda: front.stats().num_gateways == front.num_open == 0)
        assert not client.state.healthy
        let_in(own[0])
        await until(lambda: client.state.healthy)
        async with client.open(submit()) as stream:
            assert [message async for message in stream.messages()]


async def test_a_gateway_with_the_role_inference_cannot_use_sleep_mode(
    context: zmq.Context[Any], connected: Connected, until: Until, tmp_path: Path
) -> None:
    server_public, server_secret = zmq.curve_keypair()
    own = zmq.curve_keypair()
    (tmp_path / "gateways").write_bytes(own[0] + b" inference\n")
    async with (
        running_front(context, curve_secret_key=server_secret, gateway_keys_file=tmp_path / "gateways") as front,
        connected(front.address, CurveKeys(server_public, *own)) as client,
    ):
        client.set_asleep(asleep=True)
        client.forget_tenants(["tenant"])
        await until(lambda: client.state.load is not None and client.state.load.sleep_problem)
        assert client.state.load.sleep_problem == "this gateway's key does not have the role administration"
        async with client.open(submit()) as stream:
            assert [message async for message in stream.messages()]


@asynccontextmanager
async def engine_process(address: str) -> AsyncIterator[tuple[Any, ...]]:
    """`moiety engine --scripted` as a process of its own, ready."""
    code = "from moiety_platform.cli.main import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", code, "engine", "--scripted", "--scripted-step-ms", "20", "--listen", address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60):
            report = msgspec.json.decode(await process.stdout.readline())
        yield process, report["address"]
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # it is not public, and not in the stubs


async def test_a_killed_engine_process_fails_its_streams_at_once(connected: Connected, until: Until) -> None:
    async with engine_process("tcp://127.0.0.1:0") as (process, address), connected(address) as client:
        async with client.open(submit(max_tokens=500, credit_tokens=500)) as stream:
            await stream.inbox.get()
            process.kill()
            with pytest.raises(EngineFailed):
                while True:
                    await stream.inbox.get()
        await until(lambda: not client.state.healthy)
        assert client.state.reason == "the connection dropped"  # and not silence, noticed later


async def test_a_suspended_gateway_reconnects_although_the_engine_kept_sending(
    context: zmq.Context[Any], card: ModelCard, until: Until
) -> None:
    """The engine has heard nothing for longer than the limit, and has given the gateway up."""
    engine, clock = context.socket(zmq.ROUTER), ManualClock()
    client = ZmqEngineClient(f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}", context, clock)

    async def next_message() -> tuple[Any, ...]:
        await until(lambda: engine.poll(0))
        identity, frame = engine.recv_multipart()
        return identity, decode_to_engine(frame)[0]

    await client.start()
    try:
        identity, hello = await next_message()
        assert isinstance(hello, Hello)
        engine.send_multipart([identity, encode(card)])
        await until(lambda: client.state.healthy)
        asyncio.get_running_loop().remove_reader(client._session._socket.fileno())  # it does not get to read
        while not isinstance((await next_message())[1], Heartbeat):
            pass
        for _ in range(3):
            await asyncio.sleep(0)  # what follows a beat is done
        load = Load(
            **(
                dict.fromkeys(Load.__struct_fields__, 0)
                | {
                    "engine_id": card.engine_id,
                    "draining": False,
                    "classes": [],
                    "unacknowledged_replicas": [],
                    "step_costs": None,
                }
            )
        )
        engine.send_multipart([identity, encode(load)])
        clock.advance(SILENCE_LIMIT_S + 1)
        other_identity, hello = await next_message()
        assert isinstance(hello, Hello)
        assert other_identity != identity
        assert "stood still" in client.state.reason
    finally:
        await client.close()
        engine.close(linger=0)


async def test_an_engine_that_falls_silent_is_given_up(
    connected: Connected,
) -> None:
    async with engine_process("tcp://127.0.0.1:0") as (process, address), connected(address) as client:
        async with client.open(submit(max_tokens=500, credit_tokens=500)) as stream:
            await stream.inbox.get()
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineFailed):
                async with asyncio.timeout(60):
                    while True:
                        await stream.inbox.get()
        assert "silent" in client.state.reason


async def test_requests_that_are_submitted_at_once_make_no_frame_for_which_an_engine_hangs_up(
    context: zmq.Context[Any], connected: Connected
) -> None:
    async with (
        running_front(context) as front,
        connected(front.address) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        first = await stack.enter_async_context(client.open(submit("first", max_tokens=5000, credit_tokens=50)))
        await first.inbox.get()
        large = bytes(2 * 2**20)
        for number in range(MAX_MESSAGE_BYTES // len(large) + 1):  # in one turn of the loop
            await stack.enter_async_context(client.open(submit(f"r{number}", billing_context=large)))
        async with client.open(submit("last")) as last:
            assert [message async for message in last.messages()][-1].reason is FinishReason.LENGTH
        assert not first.ended
        assert client.state.num_connections == 1


@pytest.mark.parametrize(
    "changed", [{"stopping": Stopping(max_tokens=5, thought_budget=10**30)}, {"traceparent": "\ud800"}]
)
async def test_a_request_that_cannot_be_encoded_fails_alone(
    context: zmq.Context[Any], connected: Connected, changed: dict[str, Any]
) -> None:
    async with running_front(context) as front, connected(front.address) as client:
        async with client.open(submit("before")) as before:
            with pytest.raises(BadRequest, match="a value that no engine can take"):
                async with client.open(
                    msgspec.structs.replace(submit("bad", images=[ImageInput(0, b"image")]), **changed)
                ):
                    pass
            assert client._session is not None and not client._session.image_sync.submits, "its images are not kept"
            async with client.open(submit("after")) as after:  # all three in one turn of the loop
                for stream in (before, after):
                    assert [message async for message in stream.messages()][-1].reason is FinishReason.LENGTH
        assert client.state.num_inflight == 0
