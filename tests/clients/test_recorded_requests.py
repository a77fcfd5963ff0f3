"""Requests of coding agents, recorded from their packages and worded by us, get the right answer, whole and streamed.

Each file holds a request as the agent sends it, what the model writes, and the answer that the agent must get.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.conftest import TOOL_TEMPLATES, RunningGateway, make_card, run_gateway

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_text.tokenizer import Tokenizer

RECORDED = Path(__file__).parent / "recorded"
MODEL = "hermes"
CONTEXT_TOKENS = 40_000
SMALL_CONTEXT_TOKENS = 20_000  # less than the max_tokens of agents that speak the messages API, which clamps them


@dataclass
class Answer:
    """What an agent reads of an answer by whichever API."""

    text: str
    calls: list[list[Any]]


def _names() -> list[str]:
    return sorted(file.stem for file in RECORDED.glob("*.json"))


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The file with this name."""
    return json.loads((RECORDED / f"{request.param}.json").read_text())


@pytest.fixture
async def gateway(tmp_path: Path, recorded: dict[str, Any]) -> AsyncIterator[RunningGateway]:
    template = (TOOL_TEMPLATES / "hermes.jinja").read_text()
    size = SMALL_CONTEXT_TOKENS if recorded["path"].startswith("/v1/messages") else CONTEXT_TOKENS
    card = make_card(MODEL, MODEL, max_context_tokens=size)
    card = msgspec.structs.replace(card, chat_template=template, follows_grammars=True)
    async with run_gateway(tmp_path, [FakeEngineClient(card)]) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("recorded", _names(), indirect=True)
async def test_an_agents_request_gets_its_answer(
    gateway: RunningGateway, recorded: dict[str, Any], stream: bool
) -> None:
    writes = recorded["model_writes"]
    gateway.engine.script = lambda submit: [(65, letter) for letter in writes]
    body = recorded["body"] | {"model": MODEL, "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    status, headers, data = await gateway.post(recorded["path"], body, headers=recorded["headers"])
    assert status == 200, data
    assert headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    read = {"messages": _of_messages, "responses": _of_responses, "completions": _of_chat}
    api = recorded["path"].partition("?")[0].rpartition("/")[2]
    answer = read[api](_events(data) if stream else [json.loads(data)])
    assert [[name, json.loads(arguments)] for name, arguments in answer.calls] == recorded["answer"]["calls"]
    assert answer.text.strip() == recorded["answer"]["text"]
    (submit,) = gateway.engine.submits
    prompt = Tokenizer.from_json(gateway.engine.card.tokenizer_json).decode(submit.prompt_ids)
    missing = [text for text in recorded["prompt_has"] if text not in prompt]
    assert not missing, prompt


def _events(data: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def _of_chat(events: list[dict[str, Any]]) -> Answer:
    answer, calls = Answer("", []), dict[int, list[Any]]()
    for choice in [event["choices"][0] for event in events if event["choices"]]:
        part = choice.get("delta") or choice.get("message") or {}
        answer.text += part.get("content") or ""
        for place, call in enumerate(part.get("tool_calls") or []):
            whole = calls.setdefault(call.get("index", place), ["", ""])
            whole[0] += call["function"].get("name") or ""
            whole[1] += call["function"].get("arguments") or ""
    answer.calls = list(calls.values())
    return answer


def _of_messages(events: list[dict[str, Any]]) -> Answer:
    if events[0]["type"] == "message":
        blocks = events[0]["content"]
        calls = [[one["name"], json.dumps(one["input"])] for one in blocks if one["type"] == "tool_use"]
        return Answer("".join(one["text"] for one in blocks if one["type"] == "text"), calls)
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    answer = Answer("", [])
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            answer.calls.append([event["content_block"]["name"], ""])
        if event["type"] == "content_block_delta":
            answer.text += event["delta"].get("text", "")
            if event["delta"]["type"] == "input_json_delta":
                answer.calls[-1][1] += event["delta"]["partial_json"]
    return answer


def _of_responses(events: list[dict[str, Any]]) -> Answer:
    response = events[-1].get("response", events[-1])
    assert response["status"] == "completed"
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    answer = Answer("".join(part["text"] for part in parts), [])
    answer.calls = [[one["name"], one["arguments"]] for one in response["output"] if one["type"] == "function_call"]
    if len(events) > 1:
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == answer.text
    return answer
