"""Bytes of experts that requests are charged for, from the engine's report to the usage reports."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moiety_platform.cli.usage import in_bytes
from moiety_platform.engine_client.fake import FakeEngineClient

from .conftest import NewCard, RunningGateway, StartGateway

PER_TOKEN = 3 * 10**9  # more than 32 bits for one request
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
async def gateway(start_gateway: StartGateway, new_card: NewCard) -> AsyncIterator[RunningGateway]:
    """A gateway that stores usage, whose engine reads and moves experts."""
    engine = FakeEngineClient(new_card("engine-1", "tiny"))
    engine.expert_bytes_per_token = PER_TOKEN
    async with start_gateway([engine], stores_usage=True) as running:
        yield running


async def get(gateway: RunningGateway, path: str, key: str | None = None) -> Any:
    assert gateway.stored_usage is not None
    await gateway.stored_usage.flush()
    status, _, answer = await gateway.request("GET", f"/admin/v1{path}", b"", key or gateway.admin_key)
    assert status == 200, answer
    return json.loads(answer)


async def test_bytes_of_experts_are_in_requests_and_sums_and_the_books_agree(gateway: RunningGateway) -> None:
    for n in (1, 2):
        status, _, answer = await gateway.request(
            "POST", "/v1/chat/completions", json.dumps(CHAT | {"n": n}).encode(), gateway.key
        )
        assert status == 200, answer
    rows = (await get(gateway, "/usage/requests"))["data"]
    for row in rows:
        num = row["num_choices"]
        assert row["expert_read_bytes"] == PER_TOKEN * (num * row["prompt_tokens"] + row["output_tokens"])
        assert row["expert_moved_bytes"] == PER_TOKEN * num
    (total,) = (await get(gateway, "/usage?group_by=tenant"))["data"]
    for name in ("expert_read_bytes", "expert_moved_bytes"):
        assert total["totals"][name] == sum(row[name] for row in rows) > 2**32
    assert (await get(gateway, "/usage/reconciliation"))["agrees"]


async def test_an_administrator_of_one_tenant_does_not_see_shares_that_depend_on_others(
    gateway: RunningGateway,
) -> None:
    await gateway.request("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), gateway.key)
    body = json.dumps({"name": "boss", "role": "tenant-admin", "tenant_id": gateway.keys.tenant_id}).encode()
    _, _, made = await gateway.request("POST", "/admin/v1/keys", body, gateway.admin_key)
    key = json.loads(made)["secret"]
    (row,) = (await get(gateway, "/usage/requests", key))["data"]
    (total,) = (await get(gateway, "/usage", key))["data"]
    assert total["totals"]["requests"] == 1
    for shown in (row, total["totals"]):
        assert (shown["expert_read_bytes"], shown["expert_moved_bytes"]) == (None, None)


def test_bytes_are_shown_with_three_digits_or_more() -> None:
    shown = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_949: "999.9 kB", 999_950: "1.0 MB", 3 * 10**19: "30.0 EB"}
    assert {count: in_bytes(count) for count in shown} == shown
    assert in_bytes(5 * 10**21) == "5000.0 EB"
    assert in_bytes(None) is None
