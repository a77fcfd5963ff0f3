"""inspect-ai: its OpenAI-compatible and its Anthropic provider."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import tasks
from inspect_ai.model import (
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentText,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.tool import ToolInfo, ToolParam, ToolParams
from inspect_ai.util import JSONSchema
from tasks import LONG_TEXT, PIXEL_URL, QUESTION, RESULT, Server, expect

PARAMETERS = ToolParams(
    properties={"city": ToolParam(type="string", description="Name of the city.")}, required=["city"]
)
TOOL = ToolInfo(name="temperature_of", description="Tells how warm it is.", parameters=PARAMETERS)


def models(server: Server) -> Iterator[Any]:
    yield get_model(f"openai-api/moiety/{server.model}", base_url=server.openai_url, api_key=server.key)
    yield get_model(f"anthropic/{server.model}", base_url=server.url, api_key=server.key)


def ask(model: Any, messages: list[Any], max_tokens: int | None = 20, **more: Any) -> Any:
    tools = more.pop("tools", [])
    config = GenerateConfig(max_tokens=max_tokens, max_retries=0, **more)
    return asyncio.run(model.generate(messages, tools=tools, config=config))


def prompt_tokens(usage: Any) -> int:
    return int(usage.input_tokens + (usage.input_tokens_cache_read or 0) + (usage.input_tokens_cache_write or 0))


def chat(server: Server) -> None:
    for model in models(server):
        answer = ask(model, [ChatMessageUser(content=QUESTION)])
        expect(answer.completion and prompt_tokens(answer.usage) > 0, answer)


def tools(server: Server) -> None:
    for model in models(server):
        messages: list[Any] = [ChatMessageUser(content=QUESTION)]
        message = ask(model, messages, None, tools=[TOOL]).message
        expect(message.tool_calls and message.tool_calls[0].arguments == {"city": "Basel"}, message)
        result = ChatMessageTool(content=RESULT, tool_call_id=message.tool_calls[0].id, function="temperature_of")
        answer = ask(model, [*messages, message, result], None, tools=[TOOL]).completion
        expect(answer == tasks.ANSWER, answer)


def structured_output(server: Server) -> None:
    schema = JSONSchema(
        type="object",
        properties={"city": JSONSchema(type="string", enum=["Basel", "Bern"])},
        required=["city"],
        additionalProperties=False,
    )
    for model in models(server):
        answer = ask(
            model,
            [ChatMessageUser(content=QUESTION)],
            200,
            response_schema=ResponseSchema(name="city", json_schema=schema),
        ).completion
        expect('"city"' in answer, answer)


def thoughts(server: Server) -> None:
    for model in models(server):
        message = ask(model, [ChatMessageUser(content=QUESTION)], 4000, reasoning_effort="low").message
        expect("reasoning" in [part.type for part in message.content], message)


def images(server: Server) -> None:
    content: Any = [ContentText(text="What is it?"), ContentImage(image=PIXEL_URL)]
    for model in models(server):
        answer = ask(model, [ChatMessageUser(content=content)], 400).completion
        expect(tasks.SEEN in answer, answer)


def long_prompt(server: Server) -> None:
    for model in models(server):
        used = ask(model, [ChatMessageUser(content=LONG_TEXT)], 8).usage
        expect(prompt_tokens(used) > tasks.MIN_LONG_TOKENS, used)


if __name__ == "__main__":
    tasks.main(globals(), {"stream": "it does not stream", "cancel": "it does not stream"})
