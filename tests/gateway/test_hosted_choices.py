# ruff: noqa: F811  fixtures are imported
"""Several choices (`n`) of a hosted provider's model, whose API makes one answer for each request."""

from __future__ import annotations

from typing import Any

import pytest
from tests.gateway.scripted_provider import (
    CACHED_TOKENS,
    MODEL,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    PROTOCOLS,
    Reply,
    StartProvider,
    client_of,
    start_provider,  # noqa: F401  a fixture
)

from .conftest import RunningGateway, StartOver

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50, "n": 3}
REPLIES = (
    Reply(("one",)),
    Reply(("two", " 2"), finish="length"),
    Reply(("three",), call=("weather", "{}"), finish="tool_calls"),
)
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def streamed(gateway: RunningGateway, **more: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """Return the text and the finish reason of each choice, and the usage."""
    stream = await gateway.client.chat.completions.create(
        **(BODY | more), stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_each_choice_is_an_answer_of_its_own_whole_and_streamed(
    start_provider: StartProvider, start_over: StartOver, protocol: str
) -> None:
    provider = await start_provider(protocol)
    provider.replies += [*REPLIES, *REPLIES]
    async with start_over(client_of(provider)) as gateway:
        answer = await gateway.client.chat.completions.create(**BODY, tools=TOOLS)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        found = sorted((choice.message.content, choice.finish_reason) for choice in answer.choices)
        assert found == [("one", "stop"), ("three", "tool_calls"), ("two 2", "length")]
        texts, reasons, usage = await streamed(gateway, tools=TOOLS)
        assert sorted((texts[index], reasons[index]) for index in range(3)) == found
        for one in (answer.usage, usage):
            assert one is not None
            assert (one.prompt_tokens, one.completion_tokens) == (PROMPT_TOKENS, 3 * OUTPUT_TOKENS)
        rows = await gateway.rows.wait_for(2)
        billed = [(row.prompt_tokens, row.cached_tokens, row.output_tokens, row.num_choices) for row in rows]
        assert billed == [(PROMPT_TOKENS, CACHED_TOKENS, 3 * OUTPUT_TOKENS, 3)] * 2
    assert len(provider.bodies) == 6 and not any("n" in body for body in provider.bodies)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_fails_fails_the_request_and_none_is_sent_twice(
    start_provider: StartProvider, start_over: StartOver, protocol: str, stream: bool
) -> None:
    provider = await start_provider(protocol)
    provider.replies += [Reply(("one",)), Reply(("x" * 40,) * 3, breaks_after=4)]
    async with start_over(client_of(provider, "&retries=2")) as gateway:
        status, _, answer = await gateway.post(CHAT, BODY | {"n": 2, "stream": stream})
        assert status == (200 if stream else 502) and b"engine_failed" in answer, answer
        (row,) = await gateway.rows.wait_for(1)
        assert (row.num_choices, row.error_code) == (2, "engine_failed")
    assert len(provider.bodies) == 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_choice_that_the_provider_did_not_begin_is_sent_again_alone(
    start_provider: StartProvider, start_over: StartOver, protocol: str
) -> None:
    provider = await start_provider(protocol)
    busy = Reply(status=529, error={"type": "overloaded_error", "message": "busy"})
    provider.replies += [Reply(("one",)), busy, Reply(("three",))]
    async with start_over(client_of(provider, "&retries=2")) as gateway:
        answer = await gateway.client.chat.completions.create(**BODY)
        assert sorted(choice.message.content for choice in answer.choices) == ["Hello there", "one", "three"]
    assert len(provider.bodies) == 4
