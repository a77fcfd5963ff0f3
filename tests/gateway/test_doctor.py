"""`moiety doctor` finds faults that are planted in gateways, stores, engines and trace stores, and its advice mends."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
import zmq
from pydantic import SecretStr
from sqlalchemy import update

from moiety_engine.front.front import Front
from moiety_engine.front.settings import FrontSettings
from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.scripted.text_model import scripted_text_model
from moiety_migrations import downgrade, upgrade
from moiety_platform.cli.doctor.command import Patient, examine
from moiety_platform.cli.doctor.finding import Level
from moiety_platform.cli.doctor.machine import look_at_machine
from moiety_platform.cli.gateway import ensure_first_keys
from moiety_platform.clock import SystemClock
from moiety_platform.db.session import Database
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.listening import bind
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenants.models import ApiKey
from moiety_platform.trace_receiver.process import TraceServer, build_app
from moiety_platform.trace_receiver.settings import TraceSettings
from moiety_platform.usage.journal import create_segment, to_line, write_all
from moiety_platform.usage.models import UsageHour
from moiety_platform.usage.recorder import UsageRecorder
from moiety_platform.usage.row import UsageRow

COMMAND_S = 60
MOIETY = f'moiety() {{ {sys.executable} -m moiety_platform.cli "$@"; }}; '
TOKEN = "a token of gateways"
ROW = UsageRow(
    request_id="r-left", tenant_id="ten_a", project_id="prj_a", key_id="key_a", endpoint="/v1/chat/completions",
    model="demo", service_class="standard", started_at=datetime.now(UTC), outcome="stop", http_status=200,
    num_choices=1, prompt_tokens=10, cached_tokens=4, output_tokens=7, queue_ms=0.5, ttft_ms=12.25, duration_ms=40.0,
)  # fmt: skip


class ClockAhead(SystemClock):
    """Of a machine that no time server has set."""

    def now(self) -> datetime:
        return super().now() + timedelta(minutes=5)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class World:
    """A healthy deployment, and means to hurt it."""

    def __init__(self, patient: Patient, gateway, stack: AsyncExitStack) -> None:
        self.patient, self.gateway, self.stack = patient, gateway, stack
        self.clock = SystemClock()

    def changed(self, **settings) -> Patient:
        return dataclasses.replace(self.patient, settings=self.patient.settings.model_copy(update=settings))

    async def engine(self, **options) -> str:
        """A front that listens; its address."""
        return await self.stack.enter_async_context(run_engine(**options))

    def run(self, command: str) -> None:
        """Advice, as it stands, in a shell."""
        subprocess.run(["bash", "-c", MOIETY + command], check=True, timeout=COMMAND_S, capture_output=True)


@asynccontextmanager
async def run_engine(chat_template=None, **options):
    context = zmq.Context()
    settings = FrontSettings(**{"model": "scripted", "listen": "tcp://127.0.0.1:0", **options})
    text = scripted_text_model()
    if chat_template is not None:
        text = dataclasses.replace(text, chat_template=chat_template)
    front = Front(settings, "engine", text, ScriptedCore(Script()), context)
    await front.start()
    assert await front.wait_ready()
    try:
        yield front.address
    finally:
        await front.close()
        context.destroy(linger=0)


@asynccontextmanager
async def run_trace_store(folder, token=TOKEN, port=0):
    database = f"sqlite:///{folder / 'moiety.db'}"
    upgrade(f"sqlite:///{folder / 'traces.db'}")
    settings = TraceSettings(database_url=database, traces_token=token, log_format="json")
    async with build_app(settings) as app:
        listener = bind("127.0.0.1", port)
        server = TraceServer(app)
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/otlp"
        finally:
            server.request_exit()
            await task


@pytest.fixture(scope="module")
def migrated(tmp_path_factory):
    path = tmp_path_factory.mktemp("migrated") / "moiety.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
async def world(tmp_path, migrated, start_gateway, card):
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    shutil.copy(migrated, data_dir / "moiety.db")
    settings = GatewaySettings(data_dir=data_dir)
    keys = await ensure_first_keys(settings, reissue=False)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(start_gateway([FakeEngineClient(card)]))
        patient = Patient(settings, gateway.url, keys.admin_key, None)
        yield World(patient, gateway, stack)


# Each fault: plants itself and says what is looked at, then mends by the advice and says what is looked at.


async def no_tables(world):
    (world.patient.settings.data_dir / "moiety.db").unlink()
    advice = yield world.patient
    world.run(advice.command)
    await ensure_first_keys(world.patient.settings, reissue=False)
    yield dataclasses.replace(world.patient, admin_key=None)


async def schema_of_an_older_release(world):
    downgrade(world.patient.settings.store_url, "0015")
    advice = yield world.patient
    world.run(advice.command)
    yield world.patient


async def database_at_another_port(world):
    yield world.changed(database_url=f"postgresql://moiety@127.0.0.1:{free_port()}/moiety")
    yield world.patient  # the URL was corrected


async def pepper_lost(world):
    pepper = world.patient.settings.data_dir / "pepper"
    backup = pepper.read_text()
    pepper.unlink()
    yield world.patient
    pepper.write_text(backup)
    pepper.chmod(0o600)
    yield world.patient


async def pepper_of_another_deployment(world):
    pepper = world.patient.settings.data_dir / "pepper"
    backup = pepper.read_text()
    pepper.write_text("another pepper that is long enough")
    yield world.patient
    pepper.write_text(backup)
    yield world.patient


async def pepper_that_all_can_read(world):
    (world.patient.settings.data_dir / "pepper").chmod(0o644)
    advice = yield world.patient
    world.run(advice.command)
    yield world.patient


async def no_owner_left(world):
    database = Database.open(world.patient.settings.store_url)
    async with database.write() as session:
        await session.execute(update(ApiKey).values(revoked_at=datetime.now(UTC)))
    await database.close()
    yield world.patient
    await ensure_first_keys(world.patient.settings, reissue=True)  # as a gateway does, started with --first-keys
    yield world.patient


async def usage_of_a_killed_gateway(world):
    folder = world.patient.settings.data_dir / "usage-journal"
    folder.mkdir()
    _, descriptor = create_segment(folder)
    write_all(descriptor, to_line(ROW) + b"\n")
    os.close(descriptor)
    yield world.patient
    database = Database.open(world.patient.settings.store_url)
    recorder = UsageRecorder(database, folder)  # of a gateway that starts
    await recorder.start()
    await recorder.stop()
    await database.close()
    yield world.patient


async def clock_that_runs_ahead(world):
    world.clock = ClockAhead()
    yield world.patient
    world.clock = SystemClock()
    yield world.patient


async def books_that_differ(world):
    database = Database.open(world.patient.settings.store_url)
    recorder = UsageRecorder(database, world.patient.settings.data_dir / "usage-journal")
    await recorder.start()
    recorder.record(ROW)
    await recorder.stop()
    async with database.write() as session:
        await session.execute(update(UsageHour).values(output_tokens=UsageHour.output_tokens + 1))
    yield world.patient
    async with database.write() as session:  # what was half stored is stored
        await session.execute(update(UsageHour).values(output_tokens=UsageHour.output_tokens - 1))
    await database.close()
    yield world.patient


async def engine_that_is_not_there(world):
    address = f"tcp://127.0.0.1:{free_port()}"
    yield world.changed(engines=(address,))
    await world.engine(listen=address)
    yield world.changed(engines=(address,))


async def port_of_another_server(world):
    yield world.changed(engines=(world.gateway.url.replace("http", "tcp"),))
    yield world.changed(engines=(await world.engine(),))


def keys_of(world, server_public: bytes, **settings) -> Patient:
    public, secret = zmq.curve_keypair()
    return world.changed(
        curve_server_key=server_public.decode(), curve_public_key=public.decode(),
        curve_secret_key=SecretStr(secret.decode()), **settings,
    )  # fmt: skip


async def engine_that_wants_keys(world):
    public, secret = zmq.curve_keypair()
    engines = (await world.engine(curve_secret_key=secret),)
    yield world.changed(engines=engines)
    yield keys_of(world, public, engines=engines)


async def keys_of_another_engine(world):
    public, secret = zmq.curve_keypair()
    engines = (await world.engine(curve_secret_key=secret),)
    yield keys_of(world, zmq.curve_keypair()[0], engines=engines)
    yield keys_of(world, public, engines=engines)


async def keys_that_the_engine_has_none_of(world):
    engines = (await world.engine(),)
    yield keys_of(world, zmq.curve_keypair()[0], engines=engines)
    yield world.changed(engines=engines)


async def engines_of_one_name_that_differ(world):
    first = await world.engine()
    yield world.changed(engines=(first, await world.engine(chat_template="another")))
    yield world.changed(engines=(first, await world.engine()))


async def no_engine_configured(world):
    yield world.patient
    yield world.changed(engines=(await world.engine(),))


async def gateway_at_another_port(world):
    broken = dataclasses.replace(world.patient, admin_key=None)
    yield dataclasses.replace(broken, url=f"http://127.0.0.1:{free_port()}")
    yield broken


async def administrators_key_that_is_unknown(world):
    yield world.patient  # of the store at hand, which is not that gateway's
    yield dataclasses.replace(world.patient, admin_key=world.gateway.admin_key)


async def gateway_without_engines(world):
    world.gateway.engine.die()
    patient = dataclasses.replace(world.patient, admin_key=None)
    yield patient
    await world.gateway.engine.start()
    yield patient


async def trace_store_that_is_not_there(world):
    port = free_port()
    patient = world.changed(traces_endpoint=f"http://127.0.0.1:{port}/otlp", traces_token=SecretStr(TOKEN))
    yield patient
    await world.stack.enter_async_context(run_trace_store(patient.settings.data_dir, port=port))
    yield patient


async def trace_store_with_another_token(world):
    folder = world.patient.settings.data_dir
    endpoint = await world.stack.enter_async_context(run_trace_store(folder))
    yield world.changed(traces_endpoint=endpoint, traces_token=SecretStr("another token of gateways"))
    yield world.changed(traces_endpoint=endpoint, traces_token=SecretStr(TOKEN))


FAULTS = [
    (no_tables, "store", "database_behind"),
    (schema_of_an_older_release, "store", "database_behind"),
    (database_at_another_port, "store", "database_away"),
    (pepper_lost, "store", "pepper_missing"),
    (pepper_of_another_deployment, "store", "pepper_other"),
    (pepper_that_all_can_read, "store", "pepper_open"),
    (no_owner_left, "store", "no_owner"),
    (usage_of_a_killed_gateway, "store", "usage_left"),
    (clock_that_runs_ahead, "store", "clock_skew"),
    (books_that_differ, "store", "books_differ"),
    (engine_that_is_not_there, "engines", "engine_away"),
    (port_of_another_server, "engines", "not_an_engine"),
    (engine_that_wants_keys, "engines", "curve_missing"),
    (keys_of_another_engine, "engines", "curve_wrong"),
    (keys_that_the_engine_has_none_of, "engines", "curve_unwanted"),
    (engines_of_one_name_that_differ, "engines", "model_mismatch"),
    (no_engine_configured, "engines", "no_engines"),
    (gateway_at_another_port, "gateway", "gateway_away"),
    (administrators_key_that_is_unknown, "gateway", "admin_key_refused"),
    (gateway_without_engines, "gateway", "not_ready"),
    (trace_store_that_is_not_there, "traces", "traces_away"),
    (trace_store_with_another_token, "traces", "traces_token"),
]


@pytest.mark.parametrize(("fault", "area", "code"), FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS])
async def test_a_planted_fault_is_found_and_its_advice_mends_it(world, fault, area, code) -> None:
    steps = fault(world)
    async with aclosing(steps):
        patient = await anext(steps)
        found = await wrongs(world, patient, area)
        assert [one.code for one in found] == [code]
        assert found[0].advice
        patient = await steps.asend(found[0])
        assert await wrongs(world, patient, area) == []


async def wrongs(world, patient, area):
    only = dataclasses.replace(patient, only=frozenset({area}))
    return [one for one in await examine(only, world.clock) if one.level is Level.WRONG]


def test_too_few_open_files_are_found_and_the_command_mends_it(tmp_path) -> None:
    ask = f"moiety doctor --only machine --json --data-dir {tmp_path}"

    def run(command: str):
        done = subprocess.run(
            ["bash", "-c", MOIETY + command], check=False, timeout=COMMAND_S, capture_output=True, text=True
        )
        return done.returncode, {one["code"]: one for one in json.loads(done.stdout)["findings"]}

    status, found = run(f"ulimit -S -n 256; {ask}")
    assert (status, found["open_files"]["level"]) == (1, "wrong")
    status, found = run(f"ulimit -S -n 256; {found['open_files']['command']}; {ask}")
    assert (status, found["open_files"]["level"]) == (0, "ok")


def test_a_disk_that_is_nearly_full_is_found(tmp_path) -> None:
    found = {one.code: one for one in look_at_machine(tmp_path, min_free_bytes=1 << 60)}
    assert "make room" in found["disk_full"].advice


async def test_what_is_well_is_not_complained_of(world) -> None:
    endpoint = await world.stack.enter_async_context(run_trace_store(world.patient.settings.data_dir))
    engines = (await world.engine(), "dns+" + await world.engine())
    patient = world.changed(engines=engines, traces_endpoint=endpoint, traces_token=SecretStr(TOKEN))
    for area in ("store", "engines", "traces"):
        assert await wrongs(world, patient, area) == []
    well = dataclasses.replace(patient, admin_key=world.gateway.admin_key)
    assert await wrongs(world, well, "gateway") == []
