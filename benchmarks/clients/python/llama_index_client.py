"""LlamaIndex: OpenAILike, its function-calling program and its predict-and-call loop."""

from __future__ import annotations

import base64
from typing import Any, Literal

import tasks
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from tasks import LONG_TEXT, PIXEL, QUESTION, Server, expect


class City(BaseModel):
    """A city."""

    city: Literal["Basel", "Bern"]


def model_of(server: Server, max_tokens: int = 20) -> OpenAILike:
    return OpenAILike(
        model=server.model,
        api_base=server.openai_url,
        api_key=server.key,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        context_window=2048,
        max_tokens=max_tokens,
        max_retries=0,
    )


def chat(server: Server) -> None:
    answer = model_of(server).chat([ChatMessage(role="user", content=QUESTION)])
    expect(answer.message.content, answer)


def stream(server: Server) -> None:
    parts = list(model_of(server).stream_chat([ChatMessage(role="user", content=QUESTION)]))
    expect(parts[-1].message.content, parts)


def tools(server: Server) -> None:
    answer = model_of(server, 1000).predict_and_call([FunctionTool.from_defaults(tasks.temperature_of)], QUESTION)
    expect(answer.response == tasks.RESULT, answer)


def structured_output(server: Server) -> None:
    found: Any = model_of(server, 200).structured_predict(City, PromptTemplate(QUESTION))
    expect(isinstance(found, City), found)


def images(server: Server) -> None:
    image = ImageBlock(image=base64.b64decode(PIXEL), image_mimetype="image/png")
    answer = model_of(server, 400).chat([ChatMessage(role="user", blocks=[TextBlock(text="What is it?"), image])])
    expect(tasks.SEEN in str(answer.message.content), answer)


def long_prompt(server: Server) -> None:
    raw: Any = model_of(server, 8).chat([ChatMessage(role="user", content=LONG_TEXT)]).raw
    expect(raw.usage.prompt_tokens > tasks.MIN_LONG_TOKENS, raw)


def cancel(server: Server) -> None:
    running = model_of(server, 1000).stream_chat([ChatMessage(role="user", content=QUESTION)])
    next(iter(running))
    running.close()
    chat(server)


if __name__ == "__main__":
    tasks.main(globals(), {"thoughts": "OpenAILike does not read reasoning_content"})
