"""Conversations are encoded once for each tenant and client's salt, in every API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from moiety_platform.engine_client.fake import FakeEngineClient

from .conftest import RunningGateway, StartGateway, ToolCard

CHAT = "/v1/chat/completions"
MARKS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)

MESSAGES = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]
BODY: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}


async def tokens(gateway: RunningGateway, result: str) -> int:
    _, _, text = await gateway.request("GET", "/metrics")
    name = f'moiety_encoding_cache_tokens_total{{result="{result}"}} '
    return int(float(text.decode().partition(name)[2].split()[0]))


async def misses_of(gateway: RunningGateway, path: str, body: dict[str, Any], key: str | None = None) -> int:
    before = await tokens(gateway, "miss")
    status, _, answer = await gateway.post(path, body, key)
    assert status == 200, answer
    return await tokens(gateway, "miss") - before


@pytest.fixture
async def gateway(start_gateway: StartGateway, tool_card: ToolCard) -> AsyncIterator[RunningGateway]:
    """A gateway of a model whose template puts control tokens between messages."""
    async with start_gateway([FakeEngineClient(tool_card("tiny", template=CHATML, special=MARKS))]) as running:
        yield running


async def test_a_conversation_is_encoded_once_for_each_salt(gateway: RunningGateway) -> None:
    whole = await misses_of(gateway, CHAT, BODY)
    assert whole > 0
    assert await misses_of(gateway, CHAT, BODY) == 0
    for salt in ("a", "b"):
        assert await misses_of(gateway, CHAT, {**BODY, "cache_salt": salt}) == whole
        assert await misses_of(gateway, CHAT, {**BODY, "cache_salt": salt}) == 0
    longer = {**BODY, "messages": [*MESSAGES, {"role": "assistant", "content": "4"}, {"role": "user", "content": "5"}]}
    assert 0 < await misses_of(gateway, CHAT, longer) < whole


async def test_counts_and_other_apis_take_what_a_chat_has_encoded(gateway: RunningGateway) -> None:
    await misses_of(gateway, CHAT, BODY)
    conversation = {"model": "tiny", "messages": MESSAGES}
    assert await misses_of(gateway, "/v1/messages/count_tokens", conversation) == 0
    assert await misses_of(gateway, "/v1/messages", {**conversation, "max_tokens": 1}) == 0
    items = [{**message, "type": "message"} for message in MESSAGES]
    assert await misses_of(gateway, "/v1/responses", {"model": "tiny", "input": items, "max_output_tokens": 16}) == 0


async def test_tenants_do_not_share_what_is_encoded(gateway: RunningGateway) -> None:
    whole, key = await misses_of(gateway, CHAT, BODY), await gateway.new_tenant_key()
    assert await misses_of(gateway, CHAT, BODY, key) == whole
    assert await misses_of(gateway, CHAT, BODY, key) == 0
