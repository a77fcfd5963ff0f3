"""An engine server with a scripted core, and gateways that speak to it over real sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import zmq
import zmq.asyncio
from tests.wire_submits import wire_submit

from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.scripted.text_model import scripted_text_model
from moiety_engine.server.engine_server import EngineServer
from moiety_engine.server.settings import ServerSettings
from moiety_wire.codec import decode_to_gateway, encode
from moiety_wire.engine_load import Load
from moiety_wire.experts import ExpertBalance, ExpertLoad
from moiety_wire.messages import (
    Accepted,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    ModelCard,
    Submit,
    ToEngine,
    ToGateway,
    Tokens,
    UnacknowledgedUsage,
)

DEADLINE_S = 60.0
MODEL = "scripted"


def make_submit(request_id: str = "r", prompt: str | list[int] = "hello", **changes: Any) -> Submit:
    prompt_ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    fields = {"tenant_id": "tenant", "prompt_ids": prompt_ids, "credit_tokens": 1_000_000, "cache_salt": b"salt"}
    return wire_submit(request_id, **{**fields, **changes})


@dataclass
class Answer:
    """The messages about one request, checked for their order on arrival."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    accepted: Accepted | None = None
    num_messages: int = 0
    end: Finished | Failed | None = None

    def take(self, message: Any) -> None:
        assert self.end is None, "a message came after the end"
        assert message.seq == self.num_messages
        self.num_messages += 1
        if isinstance(message, Accepted):
            self.accepted = message
        elif isinstance(message, Tokens):
            assert self.accepted is not None, "tokens arrived before the admission decision"
            assert message.position == len(self.token_ids)
            self.token_ids += message.token_ids
            self.pieces.append(message.text)
            self.text += message.text
            self.logprobs += message.logprobs or []
        elif isinstance(message, Finished):
            self.text += message.text
            assert message.num_output_tokens == len(self.token_ids)
            self.end = message
        elif isinstance(message, Failed):
            assert message.num_output_tokens == len(self.token_ids)
            self.end = message


class Gateway:
    """The gateway's end of the connection; received messages are sorted by request."""

    def __init__(self, context: zmq.asyncio.Context, address: str, **options: int | bytes) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(address)
        self.answers: dict[str, Answer] = {}
        self.loads: list[Load] = []
        self.cards: list[ModelCard] = []
        self.expert_loads: list[ExpertLoad] = []
        self.balances: list[ExpertBalance] = []
        self._received: deque[ToGateway] = deque()

    async def send(self, *messages: ToEngine) -> None:
        for message in messages:
            await self.socket.send(encode(message))

    async def receive(self) -> ToGateway:
        if not self._received:
            self._received += decode_to_gateway(await asyncio.wait_for(self.socket.recv(), DEADLINE_S))
        message = self._received.popleft()
        if isinstance(message, ModelCard):
            self.cards.append(message)
        elif isinstance(message, Load):
            self.loads.append(message)
        elif isinstance(message, ExpertLoad):
            self.expert_loads.append(message)
        elif isinstance(message, ExpertBalance):
            self.balances.append(message)
        elif isinstance(message, UnacknowledgedUsage):
            pass
        else:
            self.answers.setdefault(message.request_id, Answer()).take(message)
        return message

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self.receive()

    async def keep_alive_and_receive(self) -> ToGateway:
        await self.send(Heartbeat(0))
        return await self.receive()

    async def until_load(self, condition: Callable[[Load], object]) -> Load:
        """Wait for a Load that meets the condition."""
        while not (self.loads and condition(self.loads[-1])):
            await self.keep_alive_and_receive()
        return self.loads[-1]

    async def greet(self) -> ModelCard:
        await self.send(Hello("gateway"))
        await self.until(lambda: self.loads)
        return self.cards[0]

    async def finish(self, request_id: str = "r") -> Answer:
        await self.until(lambda: request_id in self.answers and self.answers[request_id].end is not None)
        return self.answers[request_id]

    async def ask(self, submit: Submit) -> Answer:
        await self.send(submit)
        return await self.finish(submit.request_id)

    async def until_idle(self) -> Load:
        """Wait for a Load that shows an engine without requests and without a held block."""
        await self.until(lambda: self.loads and _is_idle(self.loads[-1]))
        return self.loads[-1]


def _is_idle(load: Load) -> bool:
    return load.kv_blocks_used == 0 and load.num_running == load.num_waiting == load.num_paused == 0


class Bench:
    """A running engine server, and a way to connect to it."""

    def __init__(self, front: EngineServer, core: Any, context: zmq.Context[Any]) -> None:
        self.front = front
        self.core = core
        self._context = zmq.asyncio.Context(context)
        self._gateways: list[Gateway] = []

    def connect(self, **options: int | bytes) -> Gateway:
        gateway = Gateway(self._context, self.front.address, **options)
        self._gateways.append(gateway)
        return gateway

    def close(self) -> None:
        for gateway in self._gateways:
            gateway.socket.close()


_numbers = itertools.count()


@asynccontextmanager
async def run_bench(
    script: Script | None = None, *, core: Any = None, wait_ready: bool = True, **options: Any
) -> AsyncIterator[Bench]:
    """Run an engine server. `options` are fields of ServerSettings, or `clock`, `unacknowledged` and `make_core`."""
    context: zmq.Context[Any] = zmq.Context()
    front_options = {name: options.pop(name) for name in ("clock", "unacknowledged") if name in options}
    make_core = options.pop("make_core", None)
    settings = ServerSettings(
        **{"model": MODEL, "listen": "tcp://127.0.0.1:0", "heartbeat_interval_s": 0.02, **options}
    )
    core = core or (make_core(context) if make_core else ScriptedCore(script or Script()))
    front = EngineServer(settings, f"engine-{next(_numbers)}", scripted_text_model(), core, context, **front_options)
    await front.start()
    if wait_ready:
        assert await asyncio.wait_for(front.wait_ready(), DEADLINE_S)
    bench = Bench(front, core, context)
    try:
        yield bench
    finally:
        await front.close()
        bench.close()
        context.destroy(linger=0)


@pytest.fixture
def bench() -> Callable[..., Any]:
    return run_bench


@pytest.fixture
def submit() -> Callable[..., Submit]:
    return make_submit
