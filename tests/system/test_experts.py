"""Experts' load of the real model, from the engine's counts to the dashboard's page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conftest import free_port

from moiety_dashboard.frames.experts import is_thin

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DEADLINE_S = 120.0


def tokens_of(server: Any) -> int:
    (model,) = server.get("/admin/v1/experts", minutes=0)["data"]
    return int(model["tokens"])


def tokens_of_demo(model: dict[str, Any]) -> int:
    return sum(tenant["tokens"] for tenant in model["tenants"] if tenant["tenant_name"] == "demo")


def wait_for_counts_of_a_new_tenant(server: Any, until: Callable[..., Any]) -> None:
    """Let a new tenant ask for one token, and wait until its prompt is counted."""

    def make(what: str, **fields: str) -> Any:
        made = server.admin.post(f"/admin/v1/{what}", json=fields)
        assert made.status_code == 201, made.text
        return made.json()

    tenant = make("tenants", name="counted")
    key = make("keys", project_id=make("projects", tenant_id=tenant["id"], name="main")["id"], name="key")
    asked = {"model": server.model, "prompt": "Who counts this?", "max_tokens": 1}
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json=asked,
        headers={"Authorization": f"Bearer {key['secret']}"},
        timeout=DEADLINE_S,
    )
    num_tokens = answer.json()["usage"]["prompt_tokens"]

    def counted() -> int:
        (model,) = server.get("/admin/v1/experts", minutes=0)["data"]
        return sum(one["tokens"] for one in model["tenants"] if one["tenant_name"] == "counted")

    until(lambda: counted() == num_tokens, "its counts")


def test_every_token_that_was_computed_is_counted_in_every_layer(
    server: Any, account: Any, until: Callable[..., Any]
) -> None:
    server.wait_until_idle()
    wait_for_counts_of_a_new_tenant(server, until)  # counts are in the order of steps: others' are complete
    (model,) = server.get("/admin/v1/experts", minutes=0)["data"]
    before, of_demo = model["tokens"], tokens_of_demo(model)
    rows = []
    for number, question in enumerate(("What is 17 + 25?", "What is the capital of Peru?"), start=1):
        asked = {"model": server.model, "messages": [{"role": "user", "content": question}], "max_tokens": 9}
        assert account.post("/v1/chat/completions", asked).status_code == 200
        rows = until(lambda number=number: len(found := account.rows()) == number and found, "its row")
    # the last token of an answer was sampled, and nothing came after it
    expected = sum(row["prompt_tokens"] - row["cached_tokens"] + row["output_tokens"] - 1 for row in rows)
    until(lambda: tokens_of(server) >= before + expected, "their counts")
    (model,) = server.get("/admin/v1/experts", minutes=0)["data"]
    assert model["tokens"] == before + expected
    assert {sum(layer) for layer in model["picks"]} == {model["tokens"] * model["experts_per_token"]}
    assert sum(tenant["tokens"] for tenant in model["tenants"]) == model["tokens"]
    assert tokens_of_demo(model) == of_demo + expected
    metrics = until(lambda: re.search(r"^moiety_expert_balancedness{.*} (0\.\d+)$", server.admin.get("/metrics").text,
                                      re.MULTILINE), "the balance in the metrics")  # fmt: skip
    assert 0 < float(metrics[1]) <= 1


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; .ci/run installs it where it may")
def test_the_experts_page_draws_them(server: Any, account: Any, until: Callable[..., Any], tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    asked = {"model": server.model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    assert account.post("/v1/chat/completions", asked).status_code == 200
    until(lambda: tokens_of(server), "its counts")
    port = free_port()
    log = tmp_path / "dashboard.log"
    command = [str(Path(sys.executable).with_name("moiety")), "dashboard", "--gateway", server.url, "--port", str(port)]
    with log.open("wb") as file:
        dashboard = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    try:
        until(lambda: "You can now view" in log.read_text(), "the dashboard")
        with sync_playwright() as playwright:
            page = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
            page.set_default_timeout(DEADLINE_S * 1000)
            page.goto(f"http://127.0.0.1:{port}/experts")
            page.get_by_label("Administrator key").fill(server.key("admin"))
            page.get_by_role("button", name="Sign in", exact=True).click()
            page.get_by_text(f"Load of {server.model} by layer and expert").wait_for()
            page.get_by_test_id("stVegaLiteChart").nth(2).wait_for()
            page.get_by_role("radio", name="since start").click()
            page.get_by_text("Layers MoE layers, since start").wait_for()
            page.get_by_text("Plan by layer").wait_for()
            page.get_by_text("Rank balancedness").wait_for()
            shown = page.get_by_test_id("stMain").inner_text()
            assert page.get_by_test_id("stException").count() == 0, shown
            (model,) = server.get("/admin/v1/experts", minutes=0)["data"]
            assert ("too few to judge the balance" in shown) == is_thin(model)  # other tests' tokens count too
    finally:
        dashboard.terminate()
        dashboard.wait(DEADLINE_S)
