"""The chart's pods run, from what it renders: installed, used, restarted under load, each in a network of its own."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tests.conftest import free_port, wait_for
from tests.endpoint_picker.picker_process import exchange, request_headers, response_headers

from .running import NEEDS_ROOT, Running, environment, running

VALUES = """
networkPolicies: {enabled: true}
gateway: {replicas: 2, deregisterSeconds: 1, drainSeconds: 20}
objectStore: {volume: {accessMode: ReadWriteMany}}
httpRoute: {enabled: true, parentRefs: [{name: public}]}
inferencePool: {enabled: true}
engines:
  - {name: demo, replicas: 2, drainSeconds: 20, options: {scripted: true, scripted-step-ms: 40}}
declared:
  classes: [{name: gold, rank: 0, ttft_s: 5}]
  tenants:
    - name: initech
      service_class: gold
      limits: {tokens_per_day: 2000000}
      projects: [{name: web, keys: [{name: ci, keySecret: initech-ci}]}]
  prices: [{model: scripted, input: 0.15, output: "0.60"}]
"""
STREAMS_A_SECOND = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(420),
    NEEDS_ROOT,
]


PICKER = "rel-moiety-endpoint-picker"


@pytest.fixture(scope="module")
def picker_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory, picker_port: int) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("pods"), VALUES, "--forward", f"{picker_port}={PICKER}") as found:
        yield found


def test_a_release_is_installed_and_a_rolling_restart_of_everything_costs_no_stream_and_no_token(
    release: Running,
) -> None:
    streams, tenant, used = asyncio.run(_restart_under_load(release))
    assert len(streams) > 40
    assert [one for one in streams if one.failure] == []
    assert [one for one in streams if one.text != one.expected] == [], "no token is missing and none comes twice"
    assert used["requests"] == len(streams)
    assert used["output_tokens"] == sum(one.usage["completion_tokens"] for one in streams)
    assert used["prompt_tokens"] == sum(one.usage["prompt_tokens"] for one in streams)
    assert tenant


def test_declared_objects_exist_after_each_job_and_the_declared_key_is_served(release: Running) -> None:
    key = release.secret("initech-ci", "key")
    as_owner = {"Authorization": f"Bearer {release.owner_key}"}
    with httpx.Client(base_url=release.url, timeout=60, trust_env=False) as client:

        def listed(what: str) -> list[dict[str, Any]]:
            return list(client.get(f"/admin/v1/{what}", headers=as_owner).json()["data"])

        (tenant,) = (one for one in listed("tenants") if one["name"] == "initech")
        (limit,) = (one for one in listed("quotas") if one["scope_id"] == tenant["id"])
        assert (tenant["service_class"], limit["kind"], limit["cap"]) == ("gold", "tokens_per_day", 2_000_000)
        assert [one["model"] for one in listed("prices")] == ["scripted"]
        body = {"model": "scripted", "prompt": "hello", "max_tokens": 5}
        answer = client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "hello")


def test_the_commands_of_the_install_page_create_a_tenant_and_a_key(release: Running) -> None:
    page = (Path(__file__).parents[2] / "docs" / "install.md").read_text(encoding="utf-8")
    typed = [line for line in page.splitlines() if line.startswith((".venv/bin/moiety tenant", ".venv/bin/moiety key"))]
    assert len(typed) == 2
    own = {"MOIETY_URL": release.url, "MOIETY_ADMIN_KEY": release.owner_key}
    for line in typed:
        command = line.replace(".venv/bin/moiety", f"{sys.executable} -m moiety_platform.cli")
        told = subprocess.run(
            ["bash", "-c", command], env=environment() | own, capture_output=True, text=True, check=True
        ).stdout
    (key,) = re.findall(r"mty_\w+\.\w+", told)
    body = {"model": "scripted", "prompt": "hello", "max_tokens": 5}
    answer = httpx.post(f"{release.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == httpx.codes.OK


def test_the_endpoint_pickers_name_the_gateway_pods_that_run(release: Running, picker_port: int) -> None:
    place = ("127.0.0.1", picker_port)
    certificate = wait_for(partial(_certificate, place), "the picker's certificate").encode()
    name = (("grpc.ssl_target_name_override", "moiety-endpoint-picker"),)

    def chosen() -> set[str]:
        """Return the destinations of requests with many keys, over one connection, which one of the pickers has."""
        credentials = grpc.ssl_channel_credentials(certificate)
        try:
            with grpc.secure_channel("{}:{}".format(*place), credentials, options=name) as channel:
                asked = [[request_headers(f"key-{one}"), response_headers()] for one in range(16)]
                answers = [exchange(channel, one)[0] for one in asked]
        except grpc.RpcError:
            return set()
        return {one.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] for one in answers}

    def gateways() -> set[str]:
        return {f"{one['address']}:8000" for one in release.pods() if one["part"] == "gateway"}

    assert len(gateways()) == 2
    wait_for(lambda: chosen() == gateways(), "the pickers to know the gateways")


@pytest.mark.parametrize(
    ("source", "target", "port", "reached"),
    [
        ("gateway", "engine-demo", 5757, True),
        ("gateway", "database", 5432, True),
        ("dashboard", "engine-demo", 5757, False),
        ("dashboard", "database", 5432, False),
        ("engine-demo", "database", 5432, False),
        ("traces", "engine-demo", 5757, False),
        ("endpoint-picker", "gateway", 8002, True),
        ("endpoint-picker", "gateway", 8000, False),
        ("endpoint-picker", "database", 5432, False),
    ],
)
def test_a_pod_reaches_what_it_is_meant_to_and_nothing_else(
    source: str, target: str, port: int, reached: bool, release: Running
) -> None:
    """By a connection from inside one pod's network to another's address."""
    address = next(one["address"] for one in release.pods() if one["part"] == target)
    done = release.run_inside(source, f"import socket; socket.create_connection(({address!r}, {port}), 3).close()")
    assert (done.returncode == 0) == reached, done.stderr.decode()


def _certificate(place: tuple[str, int]) -> str:
    try:
        return ssl.get_server_certificate(place, timeout=30)
    except OSError:
        return ""


@dataclass
class Stream:
    """One client's answer; the scripted engine repeats the prompt's own tokens."""

    expected: str
    text: str = ""
    failure: str = ""
    usage: dict[str, int] | None = None


async def _restart_under_load(release: Running) -> tuple[list[Any], str, dict[str, int]]:
    async with httpx.AsyncClient(base_url=release.url, timeout=60, trust_env=False) as client:
        as_owner = {"Authorization": f"Bearer {release.owner_key}"}
        tenant, key = await _make_tenant(client, as_owner)
        stop = asyncio.Event()
        load = asyncio.create_task(_load(client, key, stop))
        await asyncio.sleep(2)
        release.upgrade()
        await asyncio.to_thread(release.wait_for, "everything was rolled out anew")
        await asyncio.sleep(2)
        stop.set()
        streams = await load
        used: dict[str, int] = {}
        until = time.monotonic() + 60
        while used.get("requests") != len(streams) and time.monotonic() < until:
            answer = await client.get("/admin/v1/usage", params={"tenant_id": tenant}, headers=as_owner)
            used = answer.json()["data"][0]["totals"]
            await asyncio.sleep(0.5)
    return streams, tenant, used


async def _make_tenant(client: httpx.AsyncClient, as_owner: dict[str, str]) -> tuple[str, str]:
    async def make(what: str, **fields: str) -> dict[str, Any]:
        answer = await client.post(f"/admin/v1/{what}", json=fields, headers=as_owner)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    tenant = await make("tenants", name="load")
    project = await make("projects", tenant_id=tenant["id"], name="main")
    return tenant["id"], (await make("keys", project_id=project["id"], name="load"))["secret"]


async def _load(client: httpx.AsyncClient, key: str, stop: asyncio.Event) -> list[Stream]:
    tasks: list[Any] = []
    began = time.monotonic()
    while not stop.is_set():
        tasks.append(asyncio.create_task(_stream(client, key, len(tasks))))
        await asyncio.sleep(max(0.0, began + len(tasks) / STREAMS_A_SECOND - time.monotonic()))
    return await asyncio.gather(*tasks)


async def _stream(client: httpx.AsyncClient, key: str, number: int) -> Stream:
    tokens = 30 + number % 40
    prompt = f"{number:06d}" * 20
    stream = Stream(expected=prompt[:tokens])
    body = {
        "model": "scripted",
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with client.stream(
            "POST", "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as answer:
            if answer.status_code != httpx.codes.OK:
                stream.failure = f"{answer.status_code} {(await answer.aread())[:200]!r}"
                return stream
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    _take(stream, json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        stream.failure = repr(error)
    return stream


def _take(stream: Stream, chunk: dict[str, Any]) -> None:
    stream.failure = str(chunk["error"]) if "error" in chunk else stream.failure
    stream.text += "".join(choice["text"] for choice in chunk.get("choices", ()))
    stream.usage = chunk.get("usage") or stream.usage
