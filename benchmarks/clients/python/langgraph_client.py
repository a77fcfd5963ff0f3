"""LangGraph: its ready-made agent, whole and streamed."""

from __future__ import annotations

from typing import Any

import tasks
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from tasks import QUESTION, Server, expect

ASKED: Any = {"messages": [("user", QUESTION)]}


def agent_of(server: Server, *tools: Any) -> Any:
    model = ChatOpenAI(
        model=server.model, base_url=server.openai_url, api_key=server.key, max_retries=0, max_completion_tokens=40
    )
    return create_react_agent(model, list(tools))


def chat(server: Server) -> None:
    messages = agent_of(server).invoke(ASKED)["messages"]
    expect(messages[-1].text, messages)


def stream(server: Server) -> None:
    parts = [part for part, _ in agent_of(server).stream(ASKED, stream_mode="messages")]
    expect(len(parts) > 1 and "".join(part.text for part in parts), parts)


def tools(server: Server) -> None:
    messages = agent_of(server, tool(tasks.temperature_of)).invoke(ASKED)["messages"]
    expect(messages[-1].text == tasks.ANSWER and len(messages) == 4, messages)


if __name__ == "__main__":
    tasks.main({"chat": chat, "stream": stream, "tools": tools})
