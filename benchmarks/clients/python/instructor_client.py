"""instructor: documents by a tool call, by a JSON schema and in Markdown, of both vendors' APIs."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import tasks
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel
from tasks import QUESTION, Server, expect

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


def stream(server: Server) -> None:
    client: Any = instructor.from_openai(
        OpenAI(base_url=server.openai_url, api_key=server.key), mode=instructor.Mode.JSON_SCHEMA
    )
    parts = list(client.chat.completions.create_partial(model=server.model, messages=MESSAGES, response_model=City))
    expect(parts[-1].city, parts)


if __name__ == "__main__":
    tasks.main({"structured output": structured_output, "stream": stream})
