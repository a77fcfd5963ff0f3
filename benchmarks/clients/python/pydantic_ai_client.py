"""pydantic-ai: agents on chat completions, responses and messages."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any, Literal

import tasks
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from tasks import LONG_TEXT, PIXEL, QUESTION, Server, expect

SETTINGS: Any = {"max_tokens": 200}


class City(BaseModel):
    """A city."""

    city: Literal["Basel", "Bern"]


def models(server: Server) -> Iterator[Any]:
    provider = OpenAIProvider(base_url=server.openai_url, api_key=server.key)
    yield OpenAIChatModel(server.model, provider=provider)
    yield OpenAIResponsesModel(server.model, provider=provider)
    yield AnthropicModel(server.model, provider=AnthropicProvider(base_url=server.url, api_key=server.key))


def chat(server: Server) -> None:
    for model in models(server):
        result = Agent(model, model_settings=SETTINGS).run_sync(QUESTION)
        expect(result.output and result.usage.input_tokens > 0, result)


def stream(server: Server) -> None:
    for model in models(server):
        result = Agent(model, model_settings=SETTINGS).run_stream_sync(QUESTION)
        parts = list(result.stream_text(delta=True))
        expect("".join(parts), parts)


def tools(server: Server) -> None:
    for model in models(server):
        result = Agent(model, tools=[tasks.temperature_of]).run_sync(QUESTION)
        expect(result.output == tasks.ANSWER, result)


def structured_output(server: Server) -> None:
    for model in models(server):
        native = [] if isinstance(model, AnthropicModel) else [NativeOutput(City)]  # for models that it knows
        for output in (City, *native):
            result = Agent(model, output_type=output).run_sync(QUESTION)
            expect(isinstance(result.output, City), result)


def thoughts(server: Server) -> None:
    for model in models(server):
        message = Agent(model).run_sync(QUESTION).all_messages()[-1]
        expect("thinking" in [part.part_kind for part in message.parts], message)


def images(server: Server) -> None:
    image = BinaryContent(base64.b64decode(PIXEL), media_type="image/png")
    for model in models(server):
        result = Agent(model).run_sync(["What is it?", image])
        expect(tasks.SEEN in result.output, result)


def cancel(server: Server) -> None:
    async def run(model: Any) -> None:
        async with Agent(model, model_settings=SETTINGS).run_stream(QUESTION) as result:
            async for _ in result.stream_text(delta=True):
                break

    for model in models(server):
        asyncio.run(run(model))
    chat(server)


def long_prompt(server: Server) -> None:
    for model in models(server):
        used = Agent(model, model_settings=SETTINGS).run_sync(LONG_TEXT).usage
        expect(used.input_tokens > tasks.MIN_LONG_TOKENS, used)


if __name__ == "__main__":
    tasks.main(globals())
