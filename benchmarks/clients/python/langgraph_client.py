"""LangGraph: its ready-made agent, whole and streamed."""

from __future__ import annotations

from typing import Any

import tasks
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel
from tasks import LONG_TEXT, PIXEL_URL, QUESTION, Server, expect

ASKED: Any = {"messages": [("user", QUESTION)]}


class City(BaseModel):
    """A city."""

    city: str


def agent_of(server: Server, *tools: Any, max_tokens: int = 40, **more: Any) -> Any:
    model = ChatOpenAI(
        model=server.model,
        base_url=server.openai_url,
        api_key=server.key,
        max_retries=0,
        max_completion_tokens=max_tokens,
    )
    return create_react_agent(model, list(tools), **more)


def chat(server: Server) -> None:
    messages = agent_of(server).invoke(ASKED)["messages"]
    expect(messages[-1].text, messages)


def stream(server: Server) -> None:
    parts = [part for part, _ in agent_of(server).stream(ASKED, stream_mode="messages")]
    expect(len(parts) > 1 and "".join(part.text for part in parts), parts)


def tools(server: Server) -> None:
    messages = agent_of(server, tool(tasks.temperature_of)).invoke(ASKED)["messages"]
    expect(messages[-1].text == tasks.ANSWER and len(messages) == 4, messages)


def structured_output(server: Server) -> None:
    found = agent_of(server, max_tokens=200, response_format=City).invoke(ASKED)["structured_response"]
    expect(isinstance(found, City), found)


def thoughts(server: Server) -> None:
    model = ChatAnthropic(
        model_name=server.model, base_url=server.url, api_key=server.key, max_tokens=4000,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )  # fmt: skip
    agent = create_react_agent(model, [tool(tasks.temperature_of)])
    messages = agent.invoke(ASKED)["messages"]  # the second turn sends the thoughts of the first back
    kinds = [block["type"] for block in messages[1].content_blocks]
    expect("reasoning" in kinds and messages[-1].text == tasks.ANSWER, messages)


def images(server: Server) -> None:
    parts: Any = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PIXEL_URL}}]
    messages = agent_of(server, max_tokens=400).invoke({"messages": [{"role": "user", "content": parts}]})["messages"]
    expect(tasks.SEEN in messages[-1].text, messages)


def long_prompt(server: Server) -> None:
    used = agent_of(server, max_tokens=8).invoke({"messages": [("user", LONG_TEXT)]})["messages"][-1].usage_metadata
    expect(used["input_tokens"] > tasks.MIN_LONG_TOKENS, used)


def cancel(server: Server) -> None:
    running = agent_of(server, max_tokens=1000).stream(ASKED, stream_mode="messages")
    next(running)
    running.close()
    chat(server)


if __name__ == "__main__":
    tasks.main(globals())
