"""OpenAI's Python package: chat completions, and responses where both have the feature."""

from __future__ import annotations

from typing import Any, Literal

import tasks
from openai import OpenAI
from pydantic import BaseModel
from tasks import CITY_SCHEMA, LONG_TEXT, PIXEL_URL, QUESTION, RESULT, Server, expect

USER: Any = [{"role": "user", "content": QUESTION}]
TOOL: Any = {"type": "function", "function": {"name": "temperature_of", "parameters": CITY_SCHEMA}}


class City(BaseModel):
    city: Literal["Basel", "Bern"]


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=server.openai_url, api_key=server.key, timeout=tasks.TIMEOUT_S, max_retries=0)


def chat(server: Server) -> None:
    client = client_of(server)
    expect(server.model in [model.id for model in client.models.list()], "a list of models without it")
    answer = client.chat.completions.create(model=server.model, messages=USER, max_completion_tokens=20)
    expect(answer.choices[0].message.content and answer.usage and answer.usage.prompt_tokens > 0, answer)
    response = client.responses.create(model=server.model, input=QUESTION, max_output_tokens=20)
    expect(response.output_text, response)


def stream(server: Server) -> None:
    client = client_of(server)
    asked: Any = {"model": server.model, "messages": USER, "max_tokens": 20, "seed": 1}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(text == client.chat.completions.create(**asked).choices[0].message.content, text)
    expect(chunks[-1].usage and chunks[-1].usage.completion_tokens > 0, chunks[-1])
    with client.responses.stream(model=server.model, input=QUESTION, max_output_tokens=20) as events:
        kinds = [event.type for event in events]
    expect(kinds[0] == "response.created" and kinds[-1] in {"response.completed", "response.incomplete"}, kinds)


def tools(server: Server) -> None:
    client = client_of(server)
    messages = list(USER)
    asked: Any = {"model": server.model, "tools": [TOOL]}
    message = client.chat.completions.create(messages=messages, **asked).choices[0].message
    expect(message.tool_calls and message.tool_calls[0].function.arguments == '{"city": "Basel"}', message)
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}]
    answer = client.chat.completions.create(messages=messages, **asked).choices[0].message.content
    expect(answer == tasks.ANSWER, answer)
    function: Any = {"type": "function", "name": "temperature_of", "parameters": CITY_SCHEMA, "strict": False}
    first = client.responses.create(model=server.model, input=QUESTION, tools=[function], store=True)
    call = next(item for item in first.output if item.type == "function_call")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    last = client.responses.create(model=server.model, previous_response_id=first.id, input=[output], tools=[function])
    expect(last.output_text == tasks.ANSWER, last.output_text)


def structured_output(server: Server) -> None:
    client = client_of(server)
    parsed = (
        client.chat.completions.parse(model=server.model, messages=USER, response_format=City, max_tokens=200)
        .choices[0]
        .message.parsed
    )
    expect(isinstance(parsed, City), parsed)
    response = client.responses.parse(model=server.model, input=QUESTION, text_format=City, max_output_tokens=200)
    expect(isinstance(response.output_parsed, City), response)


def thoughts(server: Server) -> None:
    client = client_of(server)
    message = (
        client.chat.completions.create(model=server.model, messages=USER, reasoning_effort="high").choices[0].message
    )
    expect(getattr(message, "reasoning_content", None) and "<think>" not in (message.content or ""), message)
    response = client.responses.create(model=server.model, input=QUESTION, reasoning={"effort": "high"})
    expect("reasoning" in [item.type for item in response.output], response.output)


def images(server: Server) -> None:
    parts: Any = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PIXEL_URL}}]
    client = client_of(server)
    answer = client.chat.completions.create(model=server.model, messages=[{"role": "user", "content": parts}])
    expect(tasks.SEEN in str(answer.choices[0].message.content), answer)
    items: Any = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": PIXEL_URL}]
    response = client.responses.create(model=server.model, input=[{"role": "user", "content": items}])
    expect(tasks.SEEN in response.output_text, response)


def long_prompt(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": LONG_TEXT}], max_tokens=8
    )
    expect(answer.usage and answer.usage.prompt_tokens > tasks.MIN_LONG_TOKENS, answer.usage)


def cancel(server: Server) -> None:
    client = client_of(server)
    running = client.chat.completions.create(model=server.model, messages=USER, max_tokens=1000, stream=True)
    next(iter(running))
    running.close()
    chat(server)


if __name__ == "__main__":
    tasks.main(globals())
