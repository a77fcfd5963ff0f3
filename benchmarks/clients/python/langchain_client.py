"""LangChain: ChatOpenAI on chat completions and on responses, and ChatAnthropic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import tasks
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from tasks import LONG_TEXT, PIXEL_URL, QUESTION, Server, expect


class City(BaseModel):
    """A city."""

    city: Literal["Basel", "Bern"]


def models(server: Server, max_tokens: int = 20) -> Iterator[Any]:
    told: dict[str, Any] = {"base_url": server.openai_url, "api_key": server.key, "max_retries": 0}
    yield ChatOpenAI(model=server.model, max_tokens=max_tokens, stream_usage=True, **told)
    yield ChatOpenAI(model=server.model, max_tokens=max_tokens, use_responses_api=True, **told)
    yield ChatAnthropic(
        model_name=server.model, base_url=server.url, api_key=server.key, max_tokens=max_tokens, max_retries=0
    )


def chat(server: Server) -> None:
    for model in models(server):
        answer = model.invoke(QUESTION)
        expect(answer.text and answer.usage_metadata["input_tokens"] > 0, answer)


def stream(server: Server) -> None:
    for model in models(server):
        chunks = list(model.stream(QUESTION))
        expect("".join(chunk.text for chunk in chunks), chunks)


def tools(server: Server) -> None:
    for model in models(server, 32000):
        temperature = tool(tasks.temperature_of)
        bound = model.bind_tools([temperature])
        messages: list[Any] = [HumanMessage(QUESTION)]
        messages.append(bound.invoke(messages))
        (call,) = messages[-1].tool_calls
        messages.append(temperature.invoke(call))
        expect(bound.invoke(messages).text == tasks.ANSWER, messages)


def structured_output(server: Server) -> None:
    for model in models(server, 200):
        for method in ("json_schema", "function_calling"):
            found = model.with_structured_output(City, method=method).invoke(QUESTION)
            expect(isinstance(found, City), found)


def images(server: Server) -> None:
    parts: Any = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PIXEL_URL}}]
    for model in models(server, 400):
        answer = model.invoke([HumanMessage(parts)])
        expect(tasks.SEEN in answer.text, answer)


def thoughts(server: Server) -> None:
    told: dict[str, Any] = {"base_url": server.openai_url, "api_key": server.key, "max_retries": 0}
    responses = ChatOpenAI(model=server.model, reasoning={"effort": "low", "summary": "auto"}, **told)
    anthropic = ChatAnthropic(
        model_name=server.model, base_url=server.url, api_key=server.key, max_tokens=4000,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )  # fmt: skip
    for model in (responses, anthropic):
        blocks = model.invoke(QUESTION).content_blocks
        expect("reasoning" in [block["type"] for block in blocks], blocks)


def long_prompt(server: Server) -> None:
    for model in models(server, 8):
        used = model.invoke(LONG_TEXT).usage_metadata
        expect(used["input_tokens"] > tasks.MIN_LONG_TOKENS, used)


def cancel(server: Server) -> None:
    for model in models(server, 1000):
        running = model.stream(QUESTION)
        next(running)
        running.close()
    chat(server)


if __name__ == "__main__":
    tasks.main(globals())
