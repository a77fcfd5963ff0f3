"""OpenAI's Agents SDK on chat completions and on responses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import agents
import tasks
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel
from tasks import LONG_TEXT, PIXEL_URL, QUESTION, Server, expect

agents.set_tracing_disabled(True)  # it would send traces to its maker


class City(BaseModel):
    """A city."""

    city: Literal["Basel", "Bern"]


def agents_of(server: Server, *tools: Any, max_tokens: int = 40, **more: Any) -> Iterator[agents.Agent[Any]]:
    for api in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        model = api(server.model, AsyncOpenAI(base_url=server.openai_url, api_key=server.key, max_retries=0))
        settings = agents.ModelSettings(
            max_tokens=max_tokens, include_usage=True, truncation="auto", reasoning=Reasoning(effort="low")
        )
        yield agents.Agent(name="weather", model=model, model_settings=settings, tools=list(tools), **more)


def chat(server: Server) -> None:
    for agent in agents_of(server):
        expect(agents.Runner.run_sync(agent, QUESTION).final_output, agent)


def stream(server: Server) -> None:
    async def run(agent: agents.Agent[Any]) -> None:
        result = agents.Runner.run_streamed(agent, QUESTION)
        kinds = [event.type async for event in result.stream_events()]
        expect("raw_response_event" in kinds and result.final_output, kinds)

    for agent in agents_of(server):
        asyncio.run(run(agent))


def tools(server: Server) -> None:
    for agent in agents_of(server, agents.function_tool(tasks.temperature_of), max_tokens=4000):
        answer = agents.Runner.run_sync(agent, QUESTION).final_output
        expect(answer == tasks.ANSWER, answer)


def structured_output(server: Server) -> None:
    for agent in agents_of(server, max_tokens=200, output_type=City):
        found = agents.Runner.run_sync(agent, QUESTION).final_output
        expect(isinstance(found, City), found)


def thoughts(server: Server) -> None:
    for agent in agents_of(server, max_tokens=4000):
        kinds = [item.type for item in agents.Runner.run_sync(agent, QUESTION).new_items]
        expect("reasoning_item" in kinds, kinds)


def images(server: Server) -> None:
    content: Any = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": PIXEL_URL}]
    for agent in agents_of(server, max_tokens=400):
        answer = agents.Runner.run_sync(agent, [{"role": "user", "content": content}]).final_output
        expect(tasks.SEEN in answer, answer)


def cancel(server: Server) -> None:
    async def run(agent: agents.Agent[Any]) -> None:
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            result.cancel()

    for agent in agents_of(server, max_tokens=1000):
        asyncio.run(run(agent))
    chat(server)


def long_prompt(server: Server) -> None:
    for agent in agents_of(server):
        used = agents.Runner.run_sync(agent, LONG_TEXT).raw_responses[-1].usage
        expect(used.input_tokens > tasks.MIN_LONG_TOKENS, used)


if __name__ == "__main__":
    tasks.main(globals())
