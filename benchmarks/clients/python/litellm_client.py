"""litellm as a client: its OpenAI provider, its Anthropic provider and its responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import litellm
import tasks
from pydantic import BaseModel
from tasks import CITY_SCHEMA, LONG_TEXT, PIXEL_URL, QUESTION, RESULT, Server, expect

litellm.telemetry = False
TOOL: Any = {"type": "function", "function": {"name": "temperature_of", "parameters": CITY_SCHEMA}}
USER: Any = [{"role": "user", "content": QUESTION}]


class City(BaseModel):
    """A city."""

    city: Literal["Basel", "Bern"]


def providers(server: Server) -> Iterator[dict[str, Any]]:
    shared: dict[str, Any] = {"api_key": server.key, "timeout": tasks.TIMEOUT_S, "num_retries": 0}
    yield {"model": f"openai/{server.model}", "api_base": server.openai_url, **shared}
    yield {"model": f"hosted_vllm/{server.model}", "api_base": server.openai_url, **shared}
    yield {"model": f"anthropic/{server.model}", "api_base": server.url, **shared}


def chat(server: Server) -> None:
    for provider in providers(server):
        answer: Any = litellm.completion(messages=USER, max_tokens=20, **provider)
        expect(answer.choices[0].message.content and answer.usage.prompt_tokens > 0, answer)
    response: Any = litellm.responses(input=QUESTION, max_output_tokens=20, **next(providers(server)))
    expect(response.output, response)


def stream(server: Server) -> None:
    for provider in providers(server):
        chunks = list(litellm.completion(messages=USER, max_tokens=20, stream=True, **provider))
        expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks)


def tools(server: Server) -> None:
    for provider in providers(server):
        asked: dict[str, Any] = {"tools": [TOOL], "max_tokens": 32000, **provider}
        first: Any = litellm.completion(messages=USER, **asked)
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
        answer: Any = litellm.completion(messages=[*USER, message, result], **asked)
        expect(answer.choices[0].message.content == tasks.ANSWER, answer)


def structured_output(server: Server) -> None:
    for provider in providers(server):
        answer: Any = litellm.completion(messages=USER, response_format=City, max_tokens=200, **provider)
        City.model_validate_json(answer.choices[0].message.content)


def thoughts(server: Server) -> None:
    for provider in providers(server):
        answer: Any = litellm.completion(
            messages=USER, reasoning_effort="low", max_tokens=4000, allowed_openai_params=["reasoning_effort"],
            **provider,
        )  # fmt: skip
        expect(answer.choices[0].message.reasoning_content, answer)


def images(server: Server) -> None:
    parts: Any = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PIXEL_URL}}]
    for provider in providers(server):
        answer: Any = litellm.completion(messages=[{"role": "user", "content": parts}], max_tokens=400, **provider)
        expect(tasks.SEEN in str(answer.choices[0].message.content), answer)


def long_prompt(server: Server) -> None:
    for provider in providers(server):
        answer: Any = litellm.completion(messages=[{"role": "user", "content": LONG_TEXT}], max_tokens=8, **provider)
        expect(answer.usage.prompt_tokens > tasks.MIN_LONG_TOKENS, answer.usage)


def cancel(server: Server) -> None:
    for provider in providers(server):
        running: Any = litellm.completion(messages=USER, max_tokens=1000, stream=True, **provider)
        next(running)
        running.completion_stream.close()
    chat(server)


if __name__ == "__main__":
    tasks.main(globals())
