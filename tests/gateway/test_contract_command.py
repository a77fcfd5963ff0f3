"""Contract checks of a running gateway: what the command reads from it, and a check whose client leaves."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.usage_rows import make_row

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.contracts import learned_device, recent_arrivals, serves, service_of, show_report
from moiety_platform.contracts.arrivals import ContractTerms
from moiety_platform.contracts.check import ContractReport, ContractRun, Verdict
from moiety_platform.contracts.errors import ContractProblem
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.usage.store import insert_rows
from moiety_wire.classes import SHIPPED
from moiety_wire.engine_load import StepCosts

from .conftest import NewCard, RunningGateway, StartGateway

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


async def test_traffic_classes_and_step_times_come_from_the_gateway(
    start_gateway: StartGateway, new_card: NewCard, tmp_path: Path
) -> None:
    engine = FakeEngineClient(new_card("engine-1", "tiny"))
    async with start_gateway([engine], stores_usage=True) as gateway:
        for body in (CHAT, CHAT | {"max_tokens": 2, "service_tier": "flex"}, CHAT | {"model": "none"}):
            await gateway.post("/v1/chat/completions", body)
        await gateway.stored_usage.flush()
        client = AdminClient.connect(gateway.url, gateway.admin_key, tmp_path)
        rows = (await asyncio.to_thread(client.get, "/classes"))["data"]
        classes = {row["name"]: service_of(row) for row in rows}
        assert {one.name: one for one in SHIPPED} == classes
        found = await asyncio.to_thread(recent_arrivals, client, 1.0, 1800.0, None, classes)
        length = RunningGateway.prompt_tokens("hi")
        served = sorted((one.input_tokens, one.output_tokens, one.service_class) for one in found)
        assert served == [(length, 2, "flex"), (length, 4, "standard")]
        assert all(0 <= one.at_s <= 7200 for one in found)
        only = await asyncio.to_thread(recent_arrivals, client, 1.0, 1800.0, "tiny", {"flex": classes["flex"]})
        assert [one.service_class for one in only] == ["flex"]
        listed = (await asyncio.to_thread(client.get, "/engines"))["data"]
        assert [serves(one, "tiny") for one in listed] == [True] and not serves(listed[0], "other")
        with pytest.raises(ContractProblem, match="--device"):
            learned_device(listed, tmp_path)
        engine.step_costs = StepCosts(0.01, 0.001, ((96, 0.002),), 0.0, 0.0, 0.1)
        listed = (await asyncio.to_thread(client.get, "/engines"))["data"]
        written = Path(learned_device(listed, tmp_path))
        device = json.loads(await asyncio.to_thread(written.read_text))
        assert (device["overhead_s"], device["token_s"], device["bends"]) == (0.01, 0.001, [[96, 0.002]])
        client.http.close()


async def test_only_the_requests_of_the_busiest_hours_are_read(
    start_gateway: StartGateway, new_card: NewCard, tmp_path: Path
) -> None:
    now = datetime.now(UTC).replace(minute=30, second=0, microsecond=0)
    ages_h = {"quiet": 5, "busy": 50, "after busy": 49, "before the week": 200}
    tokens = {"quiet": 10, "busy": 900, "after busy": 20, "before the week": 5000}
    rows = [
        make_row(name, started_at=now - timedelta(hours=age), prompt_tokens=tokens[name], output_tokens=1)
        for name, age in ages_h.items()
    ]
    async with start_gateway([FakeEngineClient(new_card("engine-1", "tiny"))], stores_usage=True) as gateway:
        async with gateway.database.write() as session:
            await insert_rows(session, rows)
        client = AdminClient.connect(gateway.url, gateway.admin_key, tmp_path)
        classes = {one.name: one for one in SHIPPED}
        found = await asyncio.to_thread(recent_arrivals, client, 168.0, 1800.0, None, classes)
        assert sorted(one.input_tokens for one in found) == [20, 900]
        shorter = await asyncio.to_thread(recent_arrivals, client, 24.0, 1800.0, None, classes)
        assert [one.input_tokens for one in shorter] == [10]
        assert await asyncio.to_thread(recent_arrivals, client, 1.0, 1800.0, None, classes) == []
        client.http.close()


@pytest.mark.parametrize(
    ("verdict", "needed", "classes", "words"),
    [
        (Verdict.ACCEPTED, 1, [], "accepted: 1 replicas carry"),
        (Verdict.NEEDS_MORE, 3, ["flex"], "it needs 3 replicas or the class flex"),
        (Verdict.REFUSED, None, [], "refused: neither"),
    ],
)
def test_a_report_says_what_is_missing(
    verdict: Verdict, needed: int | None, classes: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ContractRun("standard", 1, {"flex": 1.0}, 0.5, ["contract"])
    show_report(ContractReport(verdict, 1, needed, classes, {}, [run]), ContractTerms("standard", 60), 10, 5, 1.5)
    printed = capsys.readouterr().out
    assert words in printed and "new tenant 50.0%; flex 100.0%; misses: contract" in printed


def simulators() -> list[psutil.Process]:
    children = psutil.Process(os.getpid()).children()
    return [child for child in children if "simulate" in child.as_dict(["cmdline"], ad_value=[])["cmdline"]]


@pytest.mark.timeout(300)  # a process that shares the processor with other tests
async def test_a_check_ends_when_its_client_leaves(start_gateway: StartGateway, new_card: NewCard) -> None:
    """The simulation of an hour with fifty requests a second takes longer than this test waits."""
    body = {"requests_per_minute": 3000, "window_s": 3600, "input_tokens": 900, "output_tokens": 300}
    body |= {"device": "a10g-llama2-7b"}
    async with start_gateway([FakeEngineClient(new_card("engine-1", "tiny"))]) as gateway:
        headers = {"Authorization": f"Bearer {gateway.admin_key}"}
        url = f"{gateway.url}/admin/v1/contract-checks"
        async with httpx.AsyncClient(headers=headers, timeout=60) as http, asyncio.timeout(240):
            async with http.stream("POST", url, json=body) as response:
                assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
                blanks = response.aiter_bytes()
                while not simulators():
                    assert (await anext(blanks)).strip() == b""
                refused = await http.post(url, json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (409, "contract_check_running")
            while simulators():  # noqa: ASYNC110 - processes, which send no event
                await asyncio.sleep(0.05)
            again = refused
            while again.status_code == 409:  # until the gateway has seen the end of the process
                again = await http.post(url, json=body | {"requests_per_minute": 6, "window_s": 60})
            assert (again.status_code, again.json()["state"]) == (200, "done"), again.text
