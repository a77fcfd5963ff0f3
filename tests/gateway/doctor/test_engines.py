"""`moiety doctor` on engines: faults that are planted are found, and its advice mends."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq
from pydantic import SecretStr
from tests.conftest import free_port

from moiety_platform.cli.doctor.command import DoctorContext
from moiety_wire.codec import encode
from moiety_wire.messages import PROTOCOL_VERSION
from moiety_wire.roles import EngineRole

from .conftest import Fault, Heals, World, each_fault


async def engine_that_is_not_there(world: World) -> AsyncIterator[Any]:
    address = f"tcp://127.0.0.1:{free_port()}"
    yield world.changed(engines=(address,))
    await world.engine(listen=address)
    yield world.changed(engines=(address,))


async def port_of_another_server(world: World) -> AsyncIterator[Any]:
    yield world.changed(engines=(world.gateway.url.replace("http", "tcp"),))
    yield world.changed(engines=(await world.engine(),))


def keys_of(world: World, server_public: bytes, **settings: Any) -> DoctorContext:
    public, secret = zmq.curve_keypair()
    return world.changed(
        curve_server_key=server_public.decode(), curve_public_key=public.decode(),
        curve_secret_key=SecretStr(secret.decode()), **settings,
    )  # fmt: skip


async def engine_that_wants_keys(world: World) -> AsyncIterator[Any]:
    public, secret = zmq.curve_keypair()
    engines = (await world.engine(curve_secret_key=secret),)
    yield world.changed(engines=engines)
    yield keys_of(world, public, engines=engines)


async def keys_of_another_engine(world: World) -> AsyncIterator[Any]:
    public, secret = zmq.curve_keypair()
    engines = (await world.engine(curve_secret_key=secret),)
    yield keys_of(world, zmq.curve_keypair()[0], engines=engines)
    yield keys_of(world, public, engines=engines)


async def keys_that_the_engine_has_none_of(world: World) -> AsyncIterator[Any]:
    engines = (await world.engine(),)
    yield keys_of(world, zmq.curve_keypair()[0], engines=engines)
    yield world.changed(engines=engines)


async def engines_of_one_name_that_differ(world: World) -> AsyncIterator[Any]:
    first = await world.engine()
    yield world.changed(engines=(first, await world.engine(chat_template="another")))
    yield world.changed(engines=(first, await world.engine()))


async def no_engine_configured(world: World) -> AsyncIterator[Any]:
    yield world.patient
    yield world.changed(engines=(await world.engine(),))


async def name_that_nobody_knows(world: World) -> AsyncIterator[Any]:
    address = await world.engine()
    yield world.changed(engines=(f"dns+tcp://engines.invalid:{address.rpartition(':')[2]}",))
    yield world.changed(engines=(f"dns+{address}",))


async def engine_that_hangs(world: World) -> AsyncIterator[Any]:
    with answering([]) as address:
        yield world.changed(engines=(address,))
    await world.engine(listen=address)
    yield world.changed(engines=(address,))


async def engine_of_another_release(world: World) -> AsyncIterator[Any]:
    older = msgspec.structs.replace(world.gateway.engine.card, protocol_version=PROTOCOL_VERSION - 1)
    with answering([encode(older)]) as address:
        yield world.changed(engines=(address,))
    await world.engine(listen=address)
    yield world.changed(engines=(address,))


@contextmanager
def answering(frames: Any) -> Iterator[str]:
    """Listen with ZeroMQ and answer any message with these; yield the address."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        done = threading.Event()

        def answer() -> None:
            while not done.is_set():
                if router.poll(10):
                    sender, *_ = router.recv_multipart()
                    for frame in frames:
                        router.send_multipart([sender, frame])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            done.set()
            thread.join()


async def prompts_without_answers(world: World) -> AsyncIterator[Any]:
    first = await world.engine(role=EngineRole.PREFILL)
    yield world.changed(engines=(first,))
    yield world.changed(engines=(first, await world.engine(role=EngineRole.DECODE)))


def another_server(world: World, model: str = "tiny", url: str | None = None) -> DoctorContext:
    """Return a deployment whose engine is the gateway itself, as an OpenAI-compatible server."""
    address = f"openai+{url or world.gateway.url}/v1?model={model}&kind=vllm&tokenizer=/checkpoint"
    return world.changed(engines=(address,), external_engine_api_key=SecretStr(world.gateway.key))


async def server_of_others_that_is_away(world: World) -> AsyncIterator[Any]:
    yield another_server(world, url=f"http://127.0.0.1:{free_port()}")
    yield another_server(world)


async def server_of_others_with_another_model(world: World) -> AsyncIterator[Any]:
    yield another_server(world, model="tinier")
    yield another_server(world)


@each_fault(
    {
        "engines": {
            no_engine_configured: "no_engines",
            name_that_nobody_knows: "engine_name_unknown",
            engine_that_is_not_there: "engine_away",
            port_of_another_server: "not_an_engine",
            engine_that_wants_keys: "curve_missing",
            keys_of_another_engine: "curve_wrong",
            keys_that_the_engine_has_none_of: "curve_unwanted",
            engine_that_hangs: "engine_silent",
            engine_of_another_release: "engine_release",
            engines_of_one_name_that_differ: "model_mismatch",
            prompts_without_answers: "role_missing",
            server_of_others_that_is_away: "external_engine_away",
            server_of_others_with_another_model: "external_engine_model",
        }
    }
)
async def test_advice_mends_a_planted_fault(heals: Heals, area: str, fault: Fault, code: str) -> None:
    assert await heals(fault, area) == ([code], [])
