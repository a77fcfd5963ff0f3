"""Adapters of tenants, as their clients and administrators see them: uploaded, named, served, and nobody else's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from moiety_engine.adapters.dummy import write_adapter
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_platform.auth.bootstrap import DEMO_TENANT

PROMPT = {"prompt": "the capital of France is", "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def other(server: Any) -> Callable[..., httpx.Response]:
    """Return a function that sends a request with a key of a second tenant."""
    tenant = server.admin.post("/admin/v1/tenants", json={"name": "second"}).json()
    project = server.admin.post("/admin/v1/projects", json={"tenant_id": tenant["id"], "name": "p"}).json()
    made = server.admin.post("/admin/v1/keys", json={"name": "k", "project_id": project["id"]}).json()
    headers = {"Authorization": f"Bearer {made['secret']}"}

    def call(method: str, path: str, **more: Any) -> httpx.Response:
        return httpx.request(method, server.url + path, headers=headers, timeout=120, **more)

    return call


@pytest.fixture(scope="module")
def served_as(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the demo tenant's adapter, uploaded with the command."""
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(folder, resolve_checkpoint(""), modules=("q_proj", "v_proj", "o_proj"), rank=8, strength=2.0)
    command = [str(Path(sys.executable).with_name("moiety")), "adapter"]
    options = ["--data-dir", str(server.data_dir), "--url", server.url]
    added = [*command, "add", DEMO_TENANT, server.model, "mine", str(folder), *options]
    subprocess.run(added, check=True, timeout=120, stdin=subprocess.DEVNULL, capture_output=True)
    (made,) = server.get("/admin/v1/adapters")["data"]
    assert made["state"] == "ready"
    yield made["served_as"]
    subprocess.run([*command, "remove", made["id"], *options], check=True, timeout=120, capture_output=True)
    assert server.get("/admin/v1/adapters")["data"] == []


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_tenants_adapter_answers_it_by_name_and_nobody_else(
    server: Any, account: Any, other: Callable[..., httpx.Response], served_as: str, until: Callable[..., Any]
) -> None:
    def ask(model: str) -> httpx.Response:
        return account.post("/v1/completions", {"model": model, **PROMPT})

    until(lambda: ask(served_as).status_code == 200, "the adapter is known")
    answer = ask(served_as)
    assert answer.json()["model"] == served_as
    assert text_of(answer) == text_of(ask(served_as))
    assert text_of(answer) != text_of(ask(server.model))
    assert answer.json()["usage"]["prompt_tokens"] > 0

    listed = httpx.get(f"{server.url}/v1/models", headers=account.headers).json()["data"]
    assert [one["id"] for one in listed] == [server.model, served_as]
    assert [one["id"] for one in other("GET", "/v1/models").json()["data"]] == [server.model]
    external = other("POST", "/v1/completions", json={"model": served_as, **PROMPT})
    missing = other("POST", "/v1/completions", json={"model": f"{server.model}:none", **PROMPT})
    assert (external.status_code, external.json()["error"]["code"]) == (404, "model_not_found")
    assert external.text.replace(served_as, "") == missing.text.replace(f"{server.model}:none", "")
    assert other("GET", f"/v1/models/{served_as}").status_code == 404


def test_it_costs_what_its_base_model_does_unless_it_has_a_price_of_its_own(
    server: Any, account: Any, served_as: str, until: Callable[..., Any]
) -> None:
    (adapter,) = server.get("/admin/v1/adapters")["data"]
    prices = {server.model: "1", f"{server.model}:{adapter['id']}": "10"}
    until(lambda: account.post("/v1/completions", {"model": served_as, **PROMPT}).status_code == 200, "it is known")
    costs = []
    for number in range(2):
        model = list(prices)[number]
        set_price = {"model": model, "input": prices[model], "output": "0"}
        assert server.admin.put("/admin/v1/prices", json=set_price).status_code == 200
        answer = account.post("/v1/completions", {"model": served_as, **PROMPT})
        row = until(lambda answer=answer: row_of(account, answer), "its row")
        assert row["model"] == served_as
        costs.append(row["cost_nanodollars"] / row["prompt_tokens"])
    for model in prices:
        server.admin.delete("/admin/v1/prices", params={"model": model})
    assert costs == [1000, 10_000]


def row_of(account: Any, answer: httpx.Response) -> Any:
    return next((row for row in account.rows() if row["request_id"] == answer.json()["id"]), None)


def test_an_engine_that_was_restarted_is_sent_the_adapter_again(
    server: Any, account: Any, served_as: str, until: Callable[..., Any]
) -> None:
    def ask() -> httpx.Response:
        return account.post("/v1/completions", {"model": served_as, **PROMPT})

    until(lambda: ask().status_code == 200, "the adapter is known")
    before, engine = text_of(ask()), server.engine_process()
    family = [engine, *engine.children(recursive=True)]
    engine.kill()
    psutil.wait_procs(family, timeout=60)
    until(lambda: server.is_serving() and ask().status_code == 200, "an engine with the adapter")
    assert text_of(ask()) == before
