"""The items of a conversation, as they are kept and listed, and as the model's chat template gets them.

An item is a plain object in the form in which OpenAI's API lists it, whether a client or a model made it. It gets its
id when it is answered or kept.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moiety_platform.errors import BadRequest
from moiety_platform.inference.tool_fields import call_for_template
from moiety_platform.openai_api.answer_types import ChatTokenLogprob

Item = dict[str, Any]

MESSAGE = "message"
CALL = "function_call"
RESULT = "function_call_output"
THOUGHT = "reasoning"

_ID_PREFIXES = {MESSAGE: "msg_", CALL: "fc_", RESULT: "fco_", THOUGHT: "rs_"}


@dataclass(frozen=True, slots=True)
class Continued:
    """The kept conversation that a response continues: its items in order, and their size as they are kept."""

    last_id: str | None = None
    items: tuple[Item, ...] = ()
    num_bytes: int = 0


def text_part(text: str, logprobs: list[ChatTokenLogprob] | None = None) -> dict[str, Any]:
    """A part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def message_item(parts: list[dict[str, Any]], status: str = "completed") -> Item:
    """A message of the model's."""
    return {"type": MESSAGE, "status": status, "role": "assistant", "content": parts}


def call_item(call_id: str, name: str, arguments: str, status: str = "completed") -> Item:
    """A call of a tool; its arguments are a JSON object, if it is complete."""
    return {"type": CALL, "status": status, "call_id": call_id, "name": name, "arguments": arguments}


def result_item(call_id: str, output: str) -> Item:
    """What a call came to."""
    return {"type": RESULT, "status": "completed", "call_id": call_id, "output": output}


def thought_item(text: str | None, status: str = "completed") -> Item:
    """What the model thought before it answered; without a text, what is known of it at first."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": THOUGHT, "status": status, "summary": [], "content": content}


def with_id(item: Item) -> Item:
    """The item with an id of its own."""
    return {"id": _ID_PREFIXES[item["type"]] + secrets.token_hex(16), **item}


def check_results(items: Iterable[Item]) -> None:
    """Every result is of a call before it, and every call has one. Raises BadRequest."""
    made, waiting = set(), dict[str, None]()
    for item in items:
        if item["type"] == CALL and _is_whole(item):
            made.add(item["call_id"])
            waiting[item["call_id"]] = None
        elif item["type"] == RESULT:
            if item["call_id"] not in made:
                raise BadRequest(
                    f"'input' has the result of the call {item['call_id'][:64]!r}, which no 'function_call' before it "
                    "has made",
                    param="input",
                )
            waiting.pop(item["call_id"], None)
    for call_id in waiting:
        raise BadRequest(
            f"there is no result of the call {call_id[:64]!r}; send it as a 'function_call_output' in 'input'",
            param="input",
        )


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The items as messages for the model's chat template: calls are the assistant message's before them, and a
    thought is that of the one after it. A call that broke off is left out."""
    thought: dict[str, str] = {}
    messages: list[dict[str, Any]] = []
    for item in items:
        if item["type"] == MESSAGE:
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": "\n".join(part["text"] for part in item["content"]), **thought})
            thought = {}
        elif item["type"] == THOUGHT:
            thought = {"reasoning_content": "\n".join(part["text"] for part in item["content"])}
        elif item["type"] == RESULT:
            messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
        elif _is_whole(item):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", **thought})
                thought = {}
            call = call_for_template(item["call_id"], item["name"], json.loads(item["arguments"]))
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _is_whole(call: Item) -> bool:
    return bool(call["status"] == "completed")
