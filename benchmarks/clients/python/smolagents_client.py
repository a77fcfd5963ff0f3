"""smolagents: OpenAIServerModel alone and as the model of a ToolCallingAgent."""

from __future__ import annotations

import base64
import io
from typing import Any

import PIL.Image
import tasks
from smolagents import ChatMessage, OpenAIServerModel, ToolCallingAgent, tool
from tasks import CITY_SCHEMA, LONG_TEXT, PIXEL, QUESTION, Server, expect


@tool
def temperature_of(city: str) -> str:
    """Return how warm it is in a city.

    Args:
        city: Name of the city.

    """
    return tasks.RESULT


def model_of(server: Server, max_tokens: int = 20) -> OpenAIServerModel:
    return OpenAIServerModel(server.model, api_base=server.openai_url, api_key=server.key, max_tokens=max_tokens)


def messages_of(text: str) -> list[Any]:
    return [ChatMessage(role="user", content=[{"type": "text", "text": text}])]


def chat(server: Server) -> None:
    answer = model_of(server).generate(messages_of(QUESTION))
    expect(answer.content, answer)


def stream(server: Server) -> None:
    parts = list(model_of(server).generate_stream(messages_of(QUESTION)))
    expect("".join(part.content or "" for part in parts), parts)


def tools(server: Server) -> None:
    agent = ToolCallingAgent(tools=[temperature_of], model=model_of(server, 4000), max_steps=3, verbosity_level=0)
    answer = agent.run(QUESTION)
    expect(tasks.RESULT in str(answer), answer)


def structured_output(server: Server) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA, "strict": True}}
    answer = model_of(server, 200).generate(messages_of(QUESTION), response_format=form)
    expect('"city"' in str(answer.content), answer)


def images(server: Server) -> None:
    image = PIL.Image.open(io.BytesIO(base64.b64decode(PIXEL)))
    content: Any = [{"type": "text", "text": "What is it?"}, {"type": "image", "image": image}]
    answer = model_of(server, 400).generate([ChatMessage(role="user", content=content)])
    expect(tasks.SEEN in str(answer.content), answer)


def cancel(server: Server) -> None:
    running: Any = model_of(server, 1000).generate_stream(messages_of(QUESTION))
    next(running)
    running.close()
    chat(server)


def long_prompt(server: Server) -> None:
    answer = model_of(server, 8).generate(messages_of(LONG_TEXT))
    expect(answer.token_usage and answer.token_usage.input_tokens > tasks.MIN_LONG_TOKENS, answer)


if __name__ == "__main__":
    tasks.main(globals(), {"thoughts": "it does not read reasoning_content"})
