"""Anthropic's Python package: messages, with its newest fields."""

from __future__ import annotations

from typing import Any, Literal

import tasks
from anthropic import Anthropic
from pydantic import BaseModel
from tasks import CITY_SCHEMA, LONG_TEXT, PIXEL, QUESTION, RESULT, Server, expect

USER: Any = [{"role": "user", "content": QUESTION}]
TOOL: Any = {"name": "temperature_of", "description": "Tells how warm it is.", "input_schema": CITY_SCHEMA}


class City(BaseModel):
    city: Literal["Basel", "Bern"]


def client_of(server: Server) -> Anthropic:
    return Anthropic(base_url=server.url, api_key=server.key, timeout=tasks.TIMEOUT_S, max_retries=0)


def prompt_tokens(usage: Any) -> int:
    """Return all tokens of the prompt: those of the cache are counted apart."""
    return int(usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0))


def chat(server: Server) -> None:
    client = client_of(server)
    expect(server.model in [model.id for model in client.models.list()], "a list of models without it")
    asked: Any = {"model": server.model, "messages": USER, "system": "Be brief."}
    counted = client.messages.count_tokens(**asked).input_tokens
    answer = client.messages.create(max_tokens=20, **asked)
    expect(prompt_tokens(answer.usage) == counted and answer.content[0].type == "text", answer)


def stream(server: Server) -> None:
    with client_of(server).messages.stream(model=server.model, messages=USER, max_tokens=20) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    expect(text and final.usage.output_tokens > 0, final)


def tools(server: Server) -> None:
    client = client_of(server)
    asked: Any = {"model": server.model, "max_tokens": 32000, "tools": [TOOL]}
    first = client.messages.create(messages=USER, **asked)
    call: Any = next(block for block in first.content if block.type == "tool_use")
    expect(call.input == {"city": "Basel"} and first.stop_reason == "tool_use", first)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT, "cache_control": {"type": "ephemeral"}}
    turns = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=turns, **asked) as events:
        text = "".join(events.text_stream)
    expect(text == tasks.ANSWER, text)


def structured_output(server: Server) -> None:
    answer = client_of(server).messages.parse(model=server.model, messages=USER, max_tokens=200, output_format=City)
    expect(isinstance(answer.parsed_output, City), answer)


def thoughts(server: Server) -> None:
    client = client_of(server)
    for thinking in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}):
        answer = client.messages.create(
            model=server.model, messages=USER, max_tokens=2048, thinking=thinking, output_config={"effort": "high"}
        )
        expect([block.type for block in answer.content] == ["thinking", "text"], answer.content)


def images(server: Server) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    parts: Any = [{"type": "text", "text": "What is it?"}, {"type": "image", "source": source}]
    answer = client_of(server).messages.create(
        model=server.model, messages=[{"role": "user", "content": parts}], max_tokens=400
    )
    expect(tasks.SEEN in str(answer.content[-1]), answer)


def long_prompt(server: Server) -> None:
    answer = client_of(server).messages.create(
        model=server.model, messages=[{"role": "user", "content": LONG_TEXT}], max_tokens=8
    )
    expect(prompt_tokens(answer.usage) > tasks.MIN_LONG_TOKENS, answer.usage)


def cancel(server: Server) -> None:
    with client_of(server).messages.stream(model=server.model, messages=USER, max_tokens=1000) as events:
        next(iter(events))
    chat(server)


if __name__ == "__main__":
    tasks.main(globals())
