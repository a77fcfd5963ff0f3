"""Requests for prefix-cache retention reach the engine from the fields of each API."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from .conftest import RunningGateway

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
ASKED: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 2}
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def marked(text: str, mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": mark}


@pytest.mark.parametrize(("retention", "keep_s"), [("24h", 86_400.0), ("in_memory", 0.0), (None, 0.0)])
async def test_openais_retention_reaches_the_engine_by_both_of_its_apis(
    gateway: RunningGateway, retention: str | None, keep_s: float
) -> None:
    await gateway.client.chat.completions.create(**HELLO, prompt_cache_retention=retention)
    response = await gateway.client.responses.create(**ASKED, prompt_cache_retention=retention)
    assert response.prompt_cache_retention == retention
    assert [submit.keep_s for submit in gateway.engine.submits] == [keep_s, keep_s]


@pytest.mark.parametrize(
    ("fields", "keep_s"),
    [
        ({}, 0.0),
        ({"cache_control": EPHEMERAL}, 300.0),
        ({"system": [marked("be brief", HOUR)]}, 3600.0),
        ({"messages": [{"role": "user", "content": [marked("a", EPHEMERAL), marked("b", HOUR)]}]}, 3600.0),
        ({"messages": [*HELLO["messages"], {"role": "assistant", "content": [marked("a", EPHEMERAL)]}]}, 300.0),
    ],
)
async def test_anthropics_cache_control_reaches_the_engine_from_wherever_it_stands(
    gateway: RunningGateway, fields: dict[str, Any], keep_s: float
) -> None:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as client:
        await client.messages.create(**HELLO | fields)
    assert [submit.keep_s for submit in gateway.engine.submits] == [keep_s]


async def test_cache_retention_values_unknown_to_both_apis_are_refused(gateway: RunningGateway) -> None:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError, match="cache_control"):
            await client.messages.create(**HELLO, cache_control={"type": "ephemeral", "ttl": "2h"})
    status, _, answer = await gateway.request(
        "POST", "/v1/chat/completions", b'{"model":"tiny","messages":[],"prompt_cache_retention":"for ever"}'
    )
    assert (status, b"prompt_cache_retention" in answer) == (400, True)
