"""Hot reload of the configuration file while the gateway serves.

Its changes apply within seconds and no request fails. A file with an error changes nothing. A file that is being
written is read when it is complete."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import zmq
from prometheus_client import CollectorRegistry

from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.scripted.text_model import scripted_text_model
from moiety_engine.server.engine_server import EngineServer
from moiety_engine.server.settings import ServerSettings
from moiety_platform.live_settings import CannotApplySetting, LiveSettings, PreparedChange, changes_between
from moiety_platform.reloading.reloader import Reloader, ReloadMetrics
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.settings import SECTION, GatewaySettings

from .test_processes import Process

DEADLINE_S = 90.0
HELLO = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}


def write(path: Path, **settings: object) -> None:
    """Replace the file in one step, as a deployment should."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps({"gateway": settings}))  # JSON is YAML
    beside.replace(path)


# ── a process ──


@asynccontextmanager
async def engine(folder: Path, name: str) -> AsyncIterator[str]:
    """The address of an engine in this process."""
    context: zmq.Context[Any] = zmq.Context()
    listen = ServerSettings(model="scripted", listen=f"ipc://{folder}/{name}.sock", heartbeat_interval_s=0.05)
    front = EngineServer(listen, name, scripted_text_model(), ScriptedCore(Script(tokens=tuple(b"abc"))), context)
    await front.start()
    try:
        assert await front.wait_ready()
        yield front.address
    finally:
        await front.close()
        context.destroy(linger=0)


class Deployed:
    """A gateway process with a configuration file, and its clients."""

    def __init__(self, process: Process, url: str, keys: dict[str, str], file: Path) -> None:
        self.process, self.url, self.file = process, url, file
        headers = {"Authorization": f"Bearer {keys['tenant_key']}"}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=DEADLINE_S)
        self.admin = {"Authorization": f"Bearer {keys['admin_key']}"}
        self.statuses: list[int] = []
        self.log: list[dict[str, Any]] = []

    async def ask(self, **more: object) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=HELLO | more)

    async def load(self) -> None:
        """Send requests one after the other, each of which must succeed."""
        while True:
            self.statuses.append((await self.ask()).status_code)

    async def settings(self) -> dict[str, Any]:
        told = (await self.http.get("/admin/v1/settings", headers=self.admin)).json()
        return told | {"of": {one["name"]: one for one in told["data"]}}

    async def engines_are(self, addresses: list[str]) -> None:
        """Wait until the gateway has these engines; one that left the file goes after another one has connected."""
        found: list[str] = []
        async with asyncio.timeout(DEADLINE_S):
            while found != addresses:
                told = (await self.http.get("/admin/v1/engines", headers=self.admin)).json()["data"]
                found = [one["address"] for one in told]

    async def read_log(self) -> None:
        async for line in self.process.process.stderr:
            with contextlib.suppress(ValueError):
                self.log.append(json.loads(line))

    async def logged(self, event: str) -> dict[str, Any]:
        """Return the first such event in the log, and remove it."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for entry in self.log:
                    if entry.get("event") == event:
                        self.log.remove(entry)
                        return entry
                await asyncio.sleep(0.02)


@asynccontextmanager
async def deployed(tmp_path: Path, file: Path, **environment: str) -> AsyncIterator[Deployed]:
    keys = tmp_path / "keys.json"
    process = await Process.start(
        *("gateway", "--config", str(file), "--data-dir", str(tmp_path / "data"), "--migrate", "--port", "0"),
        *("--first-keys", str(keys), "--log-format", "json"),
    )
    listening = await process.line("stderr", "gateway_listening")
    running = Deployed(process, f"http://{listening['host']}:{listening['port']}", json.loads(keys.read_text()), file)
    reading = asyncio.create_task(running.read_log())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while (await running.http.get("/readyz")).status_code != 200:
                pass
        yield running
    finally:
        await running.http.aclose()
        reading.cancel()
        await asyncio.wait({reading})
        await process.end()


async def test_a_gateway_takes_what_its_file_says_without_a_failed_request(tmp_path: Path) -> None:
    """A file behind two links, as Kubernetes mounts a ConfigMap; and changes of all kinds under load."""
    first, second = tmp_path / "..first", tmp_path / "..second"
    for folder in (first, second):
        folder.mkdir()
    async with engine(tmp_path, "a") as a, engine(tmp_path, "b") as b:
        write(first / "moiety.yaml", engines=[a])
        (tmp_path / "..data").symlink_to(first.name)
        file = tmp_path / "moiety.yaml"
        file.symlink_to("..data/moiety.yaml")
        async with deployed(tmp_path, file) as gateway:
            load = asyncio.create_task(gateway.load())
            assert (await gateway.ask(n=3)).status_code == 200
            assert (await gateway.settings())["of"]["max_choices"] == {
                "name": "max_choices", "value": 16, "origin": "default", "reload": "at once", "waits": False,
            }  # fmt: skip

            # another file behind the link: other engines, a bound, and something that needs a restart
            write(second / "moiety.yaml", engines=[b], max_choices=2, database_url="sqlite:////elsewhere.db")
            (tmp_path / "..new").symlink_to(second.name)
            (tmp_path / "..new").replace(tmp_path / "..data")
            told = await gateway.logged("config_reloaded")
            assert told["changed"] == {"engines": [b], "max_choices": 2}
            assert told["waits_for_restart"] == ["database_url"]
            assert (await gateway.ask(n=3)).status_code == 400
            found = await gateway.settings()
            assert (found["of"]["max_choices"]["origin"], found["of"]["database_url"]["waits"]) == ("file", True)
            assert found["of"]["log_format"]["origin"] == "option"
            await gateway.engines_are([b])

            # a file that is wrong changes nothing, whatever else it says
            write(second / "moiety.yaml", engines=[a], max_choices=9, max_tools="many", prot=1)
            told = await gateway.logged("config_reload_failed")
            assert "max_tools" in told["reason"] and "prot" in told["reason"]
            assert (await gateway.ask(n=3)).status_code == 400
            assert (await gateway.http.get("/readyz")).status_code == 200
            assert "max_tools" in (await gateway.settings())["problem"]
            metrics = (await gateway.http.get("/metrics")).text
            assert "moiety_config_last_reload_successful 0.0" in metrics
            assert "moiety_config_reload_failed_total 1.0" in metrics

            # mended, and read at once when the process is told to
            write(second / "moiety.yaml", engines=[a, b], max_choices=3, log_level="debug")
            os.kill(gateway.process.process.pid, signal.SIGHUP)
            told = await gateway.logged("config_reloaded")
            assert told["changed"] == {"engines": [a, b], "max_choices": 3, "log_level": "debug"}
            assert (await gateway.ask(n=3)).status_code == 200
            assert (await gateway.settings())["problem"] == ""
            metrics = (await gateway.http.get("/metrics")).text
            assert "moiety_config_last_reload_successful 1.0" in metrics
            load.cancel()
            assert set(gateway.statuses) == {200}


# ── looking at a file ──


def watched(file: Path, live: LiveSettings[GatewaySettings] | None = None) -> SimpleNamespace:
    source = SettingsSource.open(file, SECTION, partial(GatewaySettings.load, file))
    live = live or LiveSettings(source.first)
    return SimpleNamespace(live=live, reloader=Reloader(source, live, ReloadMetrics(CollectorRegistry())))


async def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "moiety.toml"
    file.write_text("[gateway]\nmax_choices = 5\nmax_tools = 5\n")
    one = watched(file)
    await one.reloader.check_file()
    file.write_text("[gateway]\nmax_choices = 6\n")  # so far
    await one.reloader.check_file()
    assert one.live.now.max_choices == 5, "it has changed since the last look, and may be changing"
    file.write_text("[gateway]\nmax_choices = 6\nmax_tools = 6\n")
    await one.reloader.check_file()
    assert one.live.now.max_choices == 5
    await one.reloader.check_file()
    assert (one.live.now.max_choices, one.live.now.max_tools) == (6, 6)


@pytest.mark.parametrize("text", ["", "[gatewa", "[serve]\nport = 1\n", "[gateway]\nmax_choices = 0\n", None])
async def test_a_file_that_is_cut_short_empty_wrong_or_gone_changes_nothing(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "moiety.toml"
    file.write_text("[gateway]\nmax_choices = 5\n")
    one = watched(file)
    file.unlink() if text is None else file.write_text(text)
    for _ in range(2):
        await one.reloader.check_file()
    assert one.live.now.max_choices == 5
    assert one.reloader.standing.problem
    file.write_text("[gateway]\nmax_choices = 7\n")
    for _ in range(2):
        await one.reloader.check_file()
    assert (one.live.now.max_choices, one.reloader.standing.problem) == (7, "")


async def test_a_file_that_is_of_other_parts_only_may_stay_so(tmp_path: Path) -> None:
    file = tmp_path / "moiety.toml"
    file.write_text("[serve]\nport = 1\n")
    one = watched(file)
    file.write_text("[serve]\nport = 2\n")
    for _ in range(2):
        await one.reloader.check_file()
    assert (one.reloader.standing.problem, one.live.now.max_choices) == ("", 16)


async def test_a_change_that_one_part_cannot_follow_is_taken_by_none(tmp_path: Path) -> None:
    file = tmp_path / "moiety.toml"
    file.write_text("[gateway]\n")
    one, taken, opened = watched(file), [], []

    async def opens(wanted: GatewaySettings) -> PreparedChange:
        opened.append(wanted.max_choices)

        async def undo() -> None:
            opened.remove(wanted.max_choices)

        return PreparedChange(lambda: taken.append(wanted.max_choices), undo)

    async def cannot(wanted: GatewaySettings) -> PreparedChange:
        if wanted.max_tools == 1:
            raise CannotApplySetting("there is no such file; write another one")
        return PreparedChange(lambda: taken.append(wanted.max_tools))

    one.live.follow_with(["max_choices"], opens)
    one.live.follow_with(["max_tools"], cannot)
    file.write_text("[gateway]\nmax_choices = 6\nmax_tools = 1\n")
    for _ in range(2):
        await one.reloader.check_file()
    assert (taken, opened, one.live.now.max_choices) == ([], [], 16)
    assert one.reloader.standing.problem == "there is no such file; write another one"
    file.write_text("[gateway]\nmax_choices = 6\nmax_tools = 7\n")
    for _ in range(2):
        await one.reloader.check_file()
    assert (taken, opened, one.live.now.max_choices) == ([6, 7], [6], 6)


async def test_settings_from_the_environment_are_not_changed_by_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "moiety.toml"
    file.write_text("[gateway]\nmax_choices = 5\n")
    monkeypatch.setenv("MOIETY_MAX_CHOICES", "9")
    one = watched(file)
    file.write_text("[gateway]\nmax_choices = 6\n")
    one.reloader.ask()
    await one.reloader.check_file()
    assert one.live.now.max_choices == 9
    assert one.reloader.standing.problem == ""


def test_settings_that_need_a_restart_are_reported_and_not_applied() -> None:
    changes = changes_between(GatewaySettings(), GatewaySettings(port=1, max_choices=2))
    assert (dict(changes.at_once), dict(changes.at_restart)) == ({"max_choices": (16, 2)}, {"port": (8000, 1)})
