"""instructor: documents by a tool call, by a JSON schema and in Markdown, of both vendors' APIs."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import tasks
from anthropic import Anthropic
from instructor.processing.multimodal import Image
from openai import OpenAI
from pydantic import BaseModel
from tasks import LONG_TEXT, PIXEL_URL, QUESTION, Server, expect

MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class City(BaseModel):
    """A city."""

    city: Literal["Basel", "Bern"]


def structured_output(server: Server) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client: Any = instructor.from_openai(OpenAI(base_url=server.openai_url, api_key=server.key), mode=mode)
        found = client.chat.completions.create(
            model=server.model, messages=MESSAGES, response_model=City, max_retries=0
        )
        expect(isinstance(found, City), found)
    anthropic: Any = instructor.from_anthropic(Anthropic(base_url=server.url, api_key=server.key))
    found = anthropic.messages.create(
        model=server.model, messages=MESSAGES, response_model=City, max_tokens=4000, max_retries=0
    )
    expect(isinstance(found, City), found)


def client_of(server: Server) -> Any:
    return instructor.from_openai(
        OpenAI(base_url=server.openai_url, api_key=server.key), mode=instructor.Mode.JSON_SCHEMA
    )


def stream(server: Server) -> None:
    asked: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "response_model": City}
    parts = list(client_of(server).chat.completions.create_partial(**asked))
    expect(parts[-1].city, parts)


def images(server: Server) -> None:
    content = ["Which city is it?", Image.from_base64(PIXEL_URL)]
    found, completion = client_of(server).chat.completions.create_with_completion(
        model=server.model, messages=[{"role": "user", "content": content}], response_model=City, max_retries=0
    )
    expect(isinstance(found, City) and completion.usage.prompt_tokens > 0, found)


def long_prompt(server: Server) -> None:
    _, completion = client_of(server).chat.completions.create_with_completion(
        model=server.model, messages=[{"role": "user", "content": LONG_TEXT}], response_model=City, max_retries=0
    )
    expect(completion.usage.prompt_tokens > tasks.MIN_LONG_TOKENS, completion.usage)


if __name__ == "__main__":
    only = "it makes documents only"
    tasks.main(globals(), {
        "chat": only, "tools": f"{only}, by tool calls among others", "thoughts": only,
        "cancel": "it collects a stream before it returns",
    })  # fmt: skip
