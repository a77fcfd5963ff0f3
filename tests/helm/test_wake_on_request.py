"""The chart's pods run: an idle pool sleeps, is scaled to zero, and requests start it again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .running import NEEDS_ROOT, START_S, Running, running

VALUES = """
networkPolicies: {enabled: true}
gateway: {replicas: 2, deregisterSeconds: 1, drainSeconds: 5}
objectStore: {volume: {accessMode: ReadWriteMany}}
wakeOnRequest: {enabled: true, timeoutSeconds: 120, sleepAfterSeconds: 3, stopAfterSeconds: 12}
engines:
  - name: demo
    drainSeconds: 5
    model: {name: scripted}
    scaleToZero: gateway
    options: {scripted: true}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), NEEDS_ROOT]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("wake"), VALUES) as found:
        yield found


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_a_pool_sleeps_is_scaled_to_zero_and_is_started_once_by_concurrent_requests(release: Running) -> None:
    key = _tenant_key(release)

    def ask(number: int = 0) -> tuple[int, str]:
        body = {"model": "scripted", "prompt": "hello", "max_tokens": 5}
        head = {"Authorization": f"Bearer {key}"}
        found = httpx.post(f"{release.url}/v1/completions", json=body, headers=head, timeout=150, trust_env=False)
        return found.status_code, found.text if found.is_error else found.json()["choices"][0]["text"]

    def engine_pods() -> list[str]:
        return [one["pod"] for one in release.pods() if one["part"] == "engine-demo"]

    assert ask() == (200, "hello")
    wait_for(lambda: _sleep(release) == ["asleep"])
    assert ask() == (200, "hello"), "a sleeping engine is woken"
    wait_for(lambda: not engine_pods())
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers == [(200, "hello")] * 8
    assert engine_pods() == ["rel-moiety-engine-demo-0"]
    logs = "".join(path.read_text() for path in (release.folder / "pods").glob("*gateway*/*.log"))
    assert len(re.findall("engine_pool_started", logs)) == 1, "two gateways start it once"


def _tenant_key(release: Running) -> str:
    head = {"Authorization": f"Bearer {release.owner_key}"}
    with httpx.Client(base_url=f"{release.url}/admin/v1", headers=head, timeout=60, trust_env=False) as client:
        tenant = client.post("/tenants", json={"name": "acme"}).json()
        project = client.post("/projects", json={"tenant_id": tenant["id"], "name": "web"}).json()
        made = client.post("/keys", json={"project_id": project["id"], "name": "ci"})
        assert made.status_code == httpx.codes.CREATED, made.text
        return str(made.json()["secret"])


def _sleep(release: Running) -> list[str]:
    head = {"Authorization": f"Bearer {release.owner_key}"}
    found = httpx.get(f"{release.url}/admin/v1/engines", headers=head, timeout=60, trust_env=False).json()["data"]
    return [one["load"]["sleep"] for one in found if one["healthy"]]
