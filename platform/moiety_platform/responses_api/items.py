"""Items of a conversation, as they are stored and listed.

An item is a plain dict in the format in which OpenAI's API lists it, whether a client or the model made it. It gets its
id when it is answered or stored. The id has the id of its response in it, so that a reference to an item says where to
look for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moiety_platform.openai_api.answer_types import ChatTokenLogprob

Item = dict[str, Any]

MESSAGE = "message"
THOUGHT = "reasoning"
COMPACTION = "compaction"
ADDITIONAL_TOOLS = "additional_tools"

CALL = "function_call"
CUSTOM_CALL = "custom_tool_call"
PATCH_CALL = "apply_patch_call"
SHELL_CALL = "shell_call"
LOCAL_SHELL_CALL = "local_shell_call"
SEARCH_CALL = "tool_search_call"

RESULT = "function_call_output"
CUSTOM_RESULT = "custom_tool_call_output"
PATCH_RESULT = "apply_patch_call_output"
SHELL_RESULT = "shell_call_output"
LOCAL_SHELL_RESULT = "local_shell_call_output"
SEARCH_RESULT = "tool_search_output"

CALLS: Mapping[str, str] = MappingProxyType(
    {
        CALL: RESULT,
        CUSTOM_CALL: CUSTOM_RESULT,
        PATCH_CALL: PATCH_RESULT,
        SHELL_CALL: SHELL_RESULT,
        LOCAL_SHELL_CALL: LOCAL_SHELL_RESULT,
        SEARCH_CALL: SEARCH_RESULT,
    }
)
"""Types of calls that the client executes, with the types of their results."""

RESULTS = frozenset(CALLS.values())
HAVE_TOOLS = frozenset({SEARCH_RESULT, ADDITIONAL_TOOLS})  # which are offered to the model from there on
FIRST_INPUT = 0x80000  # number of a response's first input item; those of its output begin at 0

_ID_PREFIXES = {
    MESSAGE: "msg", THOUGHT: "rs", COMPACTION: "cmp", CALL: "fc", RESULT: "fco", CUSTOM_CALL: "ctc",
    CUSTOM_RESULT: "ctco", PATCH_CALL: "apc", PATCH_RESULT: "apco", SHELL_CALL: "sh", SHELL_RESULT: "sho",
    LOCAL_SHELL_CALL: "lsh", LOCAL_SHELL_RESULT: "lsho", SEARCH_CALL: "tsc", SEARCH_RESULT: "tso",
    ADDITIONAL_TOOLS: "at",
}  # fmt: skip
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{5,}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Continued:
    """Conversation that a response continues: items in order, and their stored size in bytes.

    They are of the response `last_id` and all before it, or of the conversation `conversation_id`, whose next item will
    have the position `conversation_position`.
    """

    last_id: str | None = None
    items: tuple[Item, ...] = ()
    num_bytes: int = 0
    conversation_id: str | None = None
    conversation_position: int | None = None


def text_part(text: str, logprobs: list[ChatTokenLogprob] | None = None) -> dict[str, Any]:
    """Return a text part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def message_item(parts: list[dict[str, Any]], status: str = "completed") -> Item:
    """Return a message of the model."""
    return {"type": MESSAGE, "status": status, "role": "assistant", "content": parts}


def call_item(call_id: str, name: str, arguments: str, namespace: str | None = None) -> Item:
    """Return a function call. The arguments of a complete call are a JSON object."""
    item = {"type": CALL, "status": "completed", "call_id": call_id, "name": name, "arguments": arguments}
    return item if namespace is None else {**item, "namespace": namespace}


def custom_call_item(call_id: str, name: str, text: str, namespace: str | None = None) -> Item:
    """Return a call of a custom tool. Its input is free text."""
    item = {"type": CUSTOM_CALL, "status": "completed", "call_id": call_id, "name": name, "input": text}
    return item if namespace is None else {**item, "namespace": namespace}


def result_item(kind: str, call_id: str, **fields: Any) -> Item:
    """Return the result of a call."""
    return {"type": kind, "status": "completed", "call_id": call_id, **fields}


def thought_item(text: str | None, status: str = "completed") -> Item:
    """Return a reasoning item, without content if `text` is None."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": THOUGHT, "status": status, "summary": [], "content": content}


def is_whole(call: Item) -> bool:
    """Return whether a call is complete."""
    return bool(call["status"] == "completed")


def with_id(item: Item, owner_id: str, number: int) -> Item:
    """Return the item with the id of item `number` of a response or of an addition to a conversation."""
    _, _, random = owner_id.partition("_")
    return {"id": f"{_ID_PREFIXES[item['type']]}_{random}{number:05x}", **item}


def without_id(item: Item) -> Item:
    """Return the item without its id."""
    return {name: value for name, value in item.items() if name != "id"}


def response_id_of(item_id: str) -> str | None:
    """Return the id of the response that an item belongs to, or None if it cannot be an item's id."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"
