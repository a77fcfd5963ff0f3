"""A healthy deployment for `moiety doctor`, and ways to break it."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.gateway.conftest import RunningGateway, StartGateway

from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.scripted.text_model import scripted_text_model
from moiety_engine.server.engine_server import EngineServer
from moiety_engine.server.settings import ServerSettings
from moiety_migrations import upgrade
from moiety_platform.cli.doctor.command import DoctorContext, run_doctor
from moiety_platform.cli.doctor.finding import Severity
from moiety_platform.cli.gateway import ensure_first_keys
from moiety_platform.clock import SystemClock
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.http_server import HttpServer
from moiety_platform.listening import bind
from moiety_platform.settings import GatewaySettings
from moiety_platform.trace_receiver.process import DRAIN_S, LIMITS, build_app
from moiety_platform.trace_receiver.settings import TraceSettings
from moiety_wire.messages import ModelCard

COMMAND_S = 60
MOIETY = f'moiety() {{ {sys.executable} -m moiety_platform.cli "$@"; }}; '
TOKEN = "a token of gateways"


class World:
    """A healthy deployment, and ways to break it."""

    def __init__(self, patient: DoctorContext, gateway: RunningGateway, stack: AsyncExitStack, tenant_key: str) -> None:
        self.patient, self.gateway, self.stack, self.tenant_key = patient, gateway, stack, tenant_key
        self.clock = SystemClock()

    def changed(self, **settings: Any) -> DoctorContext:
        return dataclasses.replace(self.patient, settings=self.patient.settings.model_copy(update=settings))

    async def engine(self, **options: Any) -> str:
        """Start an engine server; return its address."""
        return await self.stack.enter_async_context(run_engine(**options))

    def run(self, command: str) -> None:
        """Run advice in a shell, exactly as it is printed."""
        subprocess.run(["bash", "-c", MOIETY + command], check=True, timeout=COMMAND_S, capture_output=True)


@asynccontextmanager
async def run_engine(chat_template: Any = None, **options: Any) -> AsyncIterator[Any]:
    context = zmq.Context()
    settings = ServerSettings(**{"model": "scripted", "listen": "tcp://127.0.0.1:0", **options})
    text = scripted_text_model()
    if chat_template is not None:
        text = dataclasses.replace(text, chat_template=chat_template)
    front = EngineServer(settings, "engine", text, ScriptedCore(Script()), context)
    await front.start()
    assert await front.wait_ready()
    try:
        yield front.address
    finally:
        await front.close()
        context.destroy(linger=0)


@asynccontextmanager
async def run_trace_store(folder: Path, token: Any = TOKEN, port: int = 0) -> AsyncIterator[str]:
    database = f"sqlite:///{folder / 'moiety.db'}"
    upgrade(f"sqlite:///{folder / 'traces.db'}")
    settings = TraceSettings(database_url=database, traces_token=token, log_format="json")
    async with build_app(settings) as app:
        listener = bind("127.0.0.1", port)
        server = HttpServer(app, DRAIN_S, LIMITS)
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/otlp"
        finally:
            server.request_exit()
            await task


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrated") / "moiety.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
async def world(tmp_path: Path, migrated: Path, start_gateway: StartGateway, card: ModelCard) -> AsyncIterator[World]:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    shutil.copy(migrated, data_dir / "moiety.db")
    settings = GatewaySettings(data_dir=data_dir)
    keys = await ensure_first_keys(settings, reissue=False)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(start_gateway([FakeEngineClient(card)]))
        patient = DoctorContext(settings, gateway.url, keys.admin_key, None)
        yield World(patient, gateway, stack, keys.tenant_key)


Fault = Callable[[Any], AsyncIterator[Any]]
Heals = Callable[[Fault, str], Awaitable[tuple[list[str], list[str]]]]


def each_fault(codes: Mapping[str, Mapping[Fault, str]]) -> pytest.MarkDecorator:
    """Run the test once a fault, with the `area` that is examined, the `fault`, and the `code` that must be found."""
    rows = [(area, fault, code) for area, faults in codes.items() for fault, code in faults.items()]
    return pytest.mark.parametrize(("area", "fault", "code"), rows, ids=[fault.__name__ for _, fault, _ in rows])


@pytest.fixture
def heals(world: World) -> Heals:
    """Return a function that plants a fault, examines the deployment, follows the advice and examines it again. It
    returns the codes found before and after."""

    async def heal(fault: Any, area: Any) -> tuple[Any, ...]:
        steps = fault(world)
        async with aclosing(steps):
            patient = await anext(steps)
            found = await complaints(world, patient, area)
            assert found and found[0].advice
            patient = await steps.asend(found[0])
            left = await complaints(world, patient, area)
        return [one.code for one in found], [one.code for one in left]

    return heal


async def complaints(world: World, patient: DoctorContext, area: Any) -> Any:
    """Return the errors and warnings that are found in an area."""
    only = dataclasses.replace(patient, only=frozenset({area}))
    return [one for one in await run_doctor(only, world.clock) if one.level is not Severity.OK]
