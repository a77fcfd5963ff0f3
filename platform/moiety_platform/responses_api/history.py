"""Conversations of items as messages for the model's chat template."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from moiety_platform.errors import BadRequest
from moiety_platform.inference.tool_fields import call_for_template
from moiety_platform.responses_api.calls import call_for_model, name_for_model
from moiety_platform.responses_api.content import content_for_template
from moiety_platform.responses_api.items import (
    ADDITIONAL_TOOLS,
    CALLS,
    COMPACTION,
    MESSAGE,
    PATCH_RESULT,
    RESULTS,
    SEARCH_RESULT,
    SHELL_RESULT,
    THOUGHT,
    Item,
    is_whole,
)

SUMMARY_HEAD = "Summary of the conversation so far:\n\n"


def check_results(items: Iterable[Item]) -> None:
    """Check that every result has an earlier call, and every call a result. Raises BadRequest."""
    made, waiting = set(), dict[str, str]()
    for item in items:
        if item["type"] in CALLS and is_whole(item):
            made.add(item["call_id"])
            waiting[item["call_id"]] = CALLS[item["type"]]
        elif item["type"] in RESULTS:
            if item["call_id"] not in made:
                call = next(call for call, result in CALLS.items() if result == item["type"])
                raise BadRequest(
                    f"'input' has the result of the call {item['call_id'][:64]!r}, but no earlier {call!r} has this "
                    "call_id",
                    param="input",
                )
            waiting.pop(item["call_id"], None)
    for call_id, result in waiting.items():
        raise BadRequest(
            f"there is no result of the call {call_id[:64]!r}; send it as a {result!r} in 'input'", param="input"
        )


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the items as messages for the model's chat template.

    Calls belong to the assistant message before them, reasoning to the assistant message after it. Incomplete calls are
    omitted.
    """
    thought: dict[str, str] = {}
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item["type"]
        if kind == MESSAGE:
            role = "system" if item["role"] == "developer" else item["role"]
            content = content_for_template(item["content"], f"input.{MESSAGE}")
            messages.append({"role": role, "content": content, **thought})
            thought = {}
        elif kind == THOUGHT:
            text = "\n".join(part["text"] for part in item["content"])
            thought = {"reasoning_content": text} if text else {}
        elif kind == COMPACTION:
            messages.append({"role": "user", "content": SUMMARY_HEAD + item["summary"]})
        elif kind == ADDITIONAL_TOOLS:
            continue  # they are offered beside the messages
        elif kind in RESULTS:
            messages.append({"role": "tool", "content": content_of_result(item), "tool_call_id": item["call_id"]})
        elif is_whole(item):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", **thought})
                thought = {}
            name, arguments = call_for_model(item)
            call = call_for_template(item["call_id"], str(name), arguments)
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def content_of_result(item: Item) -> Any:
    """Return the result of a call as the content of a tool's message: a text, or parts if it has images or files."""
    match item["type"]:
        case kind if kind == PATCH_RESULT:
            return "\n".join(filter(None, (item["status"], item.get("output"))))
        case kind if kind == SHELL_RESULT:
            return "\n".join(map(_text_of_output, item["output"]))
        case kind if kind == SEARCH_RESULT:
            return msgspec.json.encode({"tools": _names(item["tools"])}).decode()
        case _:
            return content_for_template(item["output"], f"input.{item['type']}")


def _text_of_output(output: dict[str, Any]) -> str:
    outcome = output["outcome"]
    end = "timed out" if outcome["type"] == "timeout" else f"exit code {outcome['exit_code']}"
    return "\n".join(filter(None, (output["stdout"], output["stderr"], f"[{end}]")))


def _names(tools: list[dict[str, Any]]) -> list[str]:
    """Return the names of the tools that a client has found, as the model calls them."""
    names = []
    for tool in tools:
        inner = tool.get("tools")
        if isinstance(inner, list):
            names += [name_for_model(str(one.get("name")), str(tool.get("name"))) for one in inner]
        elif "name" in tool:
            names.append(str(tool["name"]))
    return names
