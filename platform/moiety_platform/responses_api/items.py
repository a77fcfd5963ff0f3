"""Items of a conversation, as they are stored and listed, and converted for the model's chat template.

An item is a plain dict in the format in which OpenAI's API lists it, whether a client or the model made it. It gets its
id when it is answered or stored.
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
    """The stored conversation that a response continues: its items in order, and their stored size in bytes."""

    last_id: str | None = None
    items: tuple[Item, ...] = ()
    num_bytes: int = 0


def text_part(text: str, logprobs: list[ChatTokenLogprob] | None = None) -> dict[str, Any]:
    """Return a text part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def message_item(parts: list[dict[str, Any]], status: str = "completed") -> Item:
    """Return a message of the model."""
    return {"type": MESSAGE, "status": status, "role": "assistant", "content": parts}


def call_item(call_id: str, name: str, arguments: str, status: str = "completed") -> Item:
    """Return a function call. The arguments of a complete call are a JSON object."""
    return {"type": CALL, "status": status, "call_id": call_id, "name": name, "arguments": arguments}


def result_item(call_id: str, output: str) -> Item:
    """Return the result of a function call."""
    return {"type": RESULT, "status": "completed", "call_id": call_id, "output": output}


def thought_item(text: str | None, status: str = "completed") -> Item:
    """Return a reasoning item, without content if `text` is None."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": THOUGHT, "status": status, "summary": [], "content": content}


def with_id(item: Item) -> Item:
    """Return the item with a new id."""
    return {"id": _ID_PREFIXES[item["type"]] + secrets.token_hex(16), **item}


def check_results(items: Iterable[Item]) -> None:
    """Check that every result has an earlier call, and every call a result. Raises BadRequest."""
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
    """Return the items as messages for the model's chat template.

    Calls belong to the assistant message before them, reasoning to the assistant message after it. Incomplete calls are
    omitted.
    """
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
