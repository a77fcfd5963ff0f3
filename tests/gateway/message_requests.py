"""Requests of the Messages API to a running gateway, and readers of what reaches the template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pydantic
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient

from .conftest import RunningGateway, StartGateway, ToolCard
from .test_tool_loops import prompt_of

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"model": "hermes", "messages": HELLO, "max_tokens": 50}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
IGNORED, ADJUSTED = "x-moiety-ignored-fields", "x-moiety-adjusted-fields"
PLAIN = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Number(pydantic.BaseModel):
    n: int


@pytest.fixture
async def plain(start_gateway: StartGateway, tool_card: ToolCard) -> AsyncIterator[RunningGateway]:
    """A gateway whose model's prompt shows each message as it is."""
    async with start_gateway([FakeEngineClient(tool_card("hermes", template=PLAIN))]) as running, running.anthropic:
        yield running


def last_prompt(gateway: RunningGateway) -> str:
    return prompt_of(gateway.engine.submits[-1], gateway.engine)


async def raw(gateway: RunningGateway, **asked: Any) -> tuple[Any, Any]:
    """Return the message and the headers."""
    response = await gateway.anthropic.beta.messages.with_raw_response.create(**{**ASKED, **asked})
    return await response.parse(), response.headers


def applied_edits(message: Any) -> Any:
    return message.context_management.applied_edits


def says(text: str) -> Callable[[Any], Any]:
    return lambda submit: [(65, letter) for letter in text]
