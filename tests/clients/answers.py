"""Recorded requests of agents, and the answers as an agent reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"


@dataclass
class Answer:
    """What an agent reads of an answer by whichever API."""

    text: str
    calls: list[list[Any]]
    is_complete: bool = True


def recorded_names() -> list[str]:
    return sorted(file.stem for file in RECORDED.glob("*.json"))


def answer_of(path: str, data: bytes, *, stream: bool) -> Answer:
    """Return the answer in the body of a response, by the API that the path names."""
    read = {"messages": _of_messages, "responses": _of_responses, "completions": _of_chat}
    api = path.partition("?")[0].rpartition("/")[2]
    return read[api](_events(data) if stream else [json.loads(data)])


def _events(data: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def _of_chat(events: list[dict[str, Any]]) -> Answer:
    answer, calls = Answer("", []), dict[int, list[Any]]()
    for choice in [event["choices"][0] for event in events if event["choices"]]:
        part = choice.get("delta") or choice.get("message") or {}
        answer.text += part.get("content") or choice.get("text") or ""
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
    assert response["status"] in {"completed", "incomplete"}
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    answer = Answer("".join(part["text"] for part in parts), [], response["status"] == "completed")
    answer.calls = [[one["name"], one["arguments"]] for one in response["output"] if one["type"] == "function_call"]
    if len(events) > 1:
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == answer.text
    return answer
