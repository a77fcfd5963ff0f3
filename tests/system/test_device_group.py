"""Real engines sleep and are woken by requests: of three models that share a device, one is awake at a time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conftest import StartServe, wait_for

MODELS = ("first", "second", "third")
DEADLINE_S = 180.0  # generous: the machine may be busy
NUM_ROUNDS = 3


@dataclass
class Deployment:
    """A gateway process with three engine processes of one device group, each with the demo model."""

    url: str
    key: str
    admin: httpx.Client

    def ask(self, model: str) -> httpx.Response:
        body = {"model": model, "prompt": "1 2 3 4", "max_tokens": 8, "temperature": 0}
        head = {"Authorization": f"Bearer {self.key}"}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=head, timeout=DEADLINE_S, trust_env=False)

    def sleep_states(self) -> dict[str, str]:
        """Return the state of each connected engine, by its model."""
        found = self.admin.get("/admin/v1/engines").json()["data"]
        return {one["card"]["model"]: one["load"]["sleep"] for one in found if one["healthy"] and one["load"]}

    def metrics(self) -> str:
        return self.admin.get("/metrics").text


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    moiety = [sys.executable, "-m", "moiety_platform.cli"]
    settings = {
        "wake_on_request": True,
        "device_group_min_awake_s": 0.5,
        "engines": [f"ipc://{tmp_path}/{model}" for model in MODELS],
    }
    (tmp_path / "moiety.json").write_text(json.dumps({"gateway": settings}))
    (tmp_path / "moiety.yaml").write_text((tmp_path / "moiety.json").read_text())
    commands = [
        [*moiety, "engine", "--name", model, "--listen", f"ipc://{tmp_path}/{model}", "--device-group", "cpu0",
         "--kv-memory-bytes", "1MB", "--host-kv-memory-bytes", "0"]
        for model in MODELS
    ]  # fmt: skip
    commands.append(
        [*moiety, "gateway", "--port", "0", "--config", str(tmp_path / "moiety.yaml"), "--data-dir",
         str(tmp_path / "data"), "--migrate", "--first-keys", str(tmp_path / "keys.json"), "--log-format", "json"]
    )  # fmt: skip
    processes = []
    for number, command in enumerate(commands):
        with (tmp_path / f"{number}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
    log_file = tmp_path / f"{len(MODELS)}.log"

    def listening() -> dict[str, Any] | None:
        assert processes[-1].poll() is None, log_file.read_text()
        found = re.search(r".*gateway_listening.*", log_file.read_text())
        return None if found is None else json.loads(found[0])

    try:
        address = wait_for(listening, "a gateway", DEADLINE_S)
        url = f"http://{address['host']}:{address['port']}"
        keys = json.loads((tmp_path / "keys.json").read_text())
        head = {"Authorization": f"Bearer {keys['admin_key']}"}
        with httpx.Client(base_url=url, headers=head, timeout=DEADLINE_S, trust_env=False) as admin:
            yield Deployment(url, keys["tenant_key"], admin)
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=DEADLINE_S)


@pytest.mark.slow
def test_requests_for_three_models_on_one_device_are_all_served_with_one_engine_awake_at_a_time(
    deployment: Deployment,
) -> None:
    def states() -> list[str]:
        return sorted(deployment.sleep_states().values())

    wait_for(lambda: states() == ["asleep", "asleep", "awake"], "the surplus engines to sleep", DEADLINE_S)
    done, most_on_device = threading.Event(), 0

    def watch() -> None:
        nonlocal most_on_device
        with httpx.Client(base_url=deployment.url, headers=deployment.admin.headers, trust_env=False) as client:
            while not done.is_set():
                found = client.get("/admin/v1/engines", timeout=DEADLINE_S).json()["data"]
                most_on_device = max(most_on_device, sum(one["load"]["sleep"] != "asleep" for one in found))

    with ThreadPoolExecutor(10) as pool:
        watching = pool.submit(watch)
        answers = list(pool.map(deployment.ask, MODELS * NUM_ROUNDS))
        done.set()
        watching.result()
    assert [one.status_code for one in answers] == [200] * len(answers), [one.text for one in answers]
    texts = {one.json()["choices"][0]["text"] for one in answers}
    assert len(texts) == 1, "weights are the same after each sleep"
    assert most_on_device == 1
    wakes = dict(re.findall(r'moiety_wakes_total\{model="(\w+)"\} (\d+)', deployment.metrics()))
    assert sum(map(int, wakes.values())) >= len(MODELS) - 1
    assert all(int(count) <= NUM_ROUNDS for count in wakes.values()), wakes
    woken = {model for model, count in wakes.items() if int(count)}
    pattern = r'moiety_wake_seconds\{kind="wake",model="(\w+)"\} ([0-9.]+)'
    wait_for(lambda: woken <= dict(re.findall(pattern, deployment.metrics())).keys(), "measured wake times", DEADLINE_S)


@pytest.mark.slow
def test_the_engine_of_serve_sleeps_when_idle_and_a_request_wakes_it(start_serve: StartServe, tmp_path: Path) -> None:
    file = tmp_path / "moiety.yaml"
    file.write_text(json.dumps({"gateway": {"wake_on_request": True, "sleep_after_s": 1}}))
    serve = start_serve("--no-dashboard", "--no-traces", "--config", str(file))
    serve.wait_for_line("moiety is ready at")
    head = {"Authorization": f"Bearer {serve.admin_key}"}
    with httpx.Client(base_url=serve.url, headers=head, timeout=DEADLINE_S, trust_env=False) as admin:
        deployment = Deployment(serve.url, serve.tenant_key, admin)
        (model,) = wait_for(deployment.sleep_states, "an engine", DEADLINE_S)
        first = deployment.ask(model)
        wait_for(lambda: deployment.sleep_states() == {model: "asleep"}, "the engine to sleep", DEADLINE_S)
        again = deployment.ask(model)
    assert (first.status_code, again.status_code) == (200, 200), (first.text, again.text)
    assert first.json()["choices"][0]["text"] == again.json()["choices"][0]["text"]
