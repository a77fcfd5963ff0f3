"""Chat requests in the form of OpenAI's Responses API, which Cursor sends to `/v1/chat/completions`.

Such a body has `input` in place of `messages`, and its tools, `reasoning` and `text` are those of that API. The client
reads chat completions. The translation changes the form only; the chat's own schema validates the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from moiety_platform.inference.body_fields import refuse, refuse_all

_NEEDS_STORAGE = ("previous_response_id", "conversation", "prompt")
_MEANT_FOR_RESPONSES = frozenset(
    ("input", "instructions", "max_output_tokens", "reasoning", "text", "tool_choice", "include", "top_logprobs")
)
_TEXT_PARTS = ("input_text", "output_text", "text")
_CALLS = {"function_call": ("function", "arguments"), "custom_tool_call": ("custom", "input")}
_RESULTS = ("function_call_output", "custom_tool_call_output")


def chat_of_responses_form(data: bytes) -> bytes | None:
    """Return the body as a chat request, or None where it is not in the form of the Responses API.

    Raises ValidationError for a reference to what is stored, which a chat cannot follow.
    """
    if b'"input"' not in data:
        return None
    try:
        body = msgspec.json.decode(data)
    except ValueError:  # of JSON or of UTF-8
        return None
    if not isinstance(body, dict) or body.get("messages") or not isinstance(body.get("input"), str | list):
        return None
    problems = [
        refuse(f"{name!r} cannot be served by a chat, which stores nothing; send the whole conversation")
        for name in _NEEDS_STORAGE
        if body.get(name)
    ]
    if problems:
        raise refuse_all(problems)
    chat = {name: value for name, value in body.items() if name not in _MEANT_FOR_RESPONSES}
    return msgspec.json.encode({**chat, "messages": _messages(body), **_options(body)})


def nested_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's tool for one in the form of the Responses API, whose name is beside its type."""
    kind = tool.get("type", "function")
    if kind not in ("function", "custom") or kind in tool or "name" not in tool:
        return tool
    inner: dict[str, Any] = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool
    }
    if "input_schema" in tool:  # Anthropic's name of the field
        inner.setdefault("parameters", tool["input_schema"])
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar" and "grammar" not in form:
        grammar = {name: value for name, value in form.items() if name != "type"}
        inner["format"] = {"type": "grammar", "grammar": grammar}
    elif form is not None:
        inner["format"] = form
    return {"type": kind, kind: inner}


def _options(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that have another name in a chat."""
    options: dict[str, Any] = {}
    if body.get("max_output_tokens") is not None:
        options["max_completion_tokens"] = body["max_output_tokens"]
    if isinstance(reasoning := body.get("reasoning"), dict) and reasoning.get("effort") is not None:
        options["reasoning_effort"] = reasoning["effort"]
    if isinstance(text := body.get("text"), dict):
        if text.get("verbosity") is not None:
            options["verbosity"] = text["verbosity"]
        form = text.get("format")
        if isinstance(form, dict) and form.get("type") == "json_schema":
            schema = {name: value for name, value in form.items() if name != "type"}
            options["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif form is not None:
            options["response_format"] = form
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom") and "name" in choice:
        choice = {"type": choice["type"], choice["type"]: {"name": choice["name"]}}
    if choice is not None:
        options["tool_choice"] = choice
    return options


def _messages(body: dict[str, Any]) -> list[Any]:
    asked = body["input"]
    items: Iterable[Any] = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    messages: list[Any] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    thought = ""
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(kind, str):
            messages.append(item)  # for the error of the chat's own schema
            continue
        if kind == "reasoning":
            thought = _text_of(item.get("content"))
        elif kind == "message":
            message = {"role": item.get("role"), "content": _parts(item.get("content"))}
            messages.append(_with_thought(message, thought))
            thought = ""
        elif kind in _CALLS:
            if not _is_assistants(messages):
                messages.append(_with_thought({"role": "assistant", "content": None}, thought))
                thought = ""
            messages[-1].setdefault("tool_calls", []).append(_call(item, *_CALLS[kind]))
        elif kind in _RESULTS:
            content = _parts(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "item_reference":
            raise refuse_all([refuse("'input' refers to a stored item, which a chat cannot read; send the item")])
    return messages


def _is_assistants(messages: list[Any]) -> bool:
    last = messages[-1] if messages else None
    return isinstance(last, dict) and last.get("role") == "assistant" and isinstance(last.get("tool_calls", []), list)


def _with_thought(message: dict[str, Any], thought: str) -> dict[str, Any]:
    return {**message, "reasoning_content": thought} if thought and message["role"] == "assistant" else message


def _call(item: dict[str, Any], kind: str, field: str) -> dict[str, Any]:
    return {
        "id": item.get("call_id"),
        "type": kind,
        kind: {"name": item.get("name"), field: item.get(field)},
    }


def _text_of(parts: Any) -> str:
    texts = [part.get("text") for part in parts or () if isinstance(part, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def _parts(content: Any) -> Any:
    """Return the content with a chat's parts. What is unknown stays as it is, for the error of the chat's schema."""
    return [_part(part) for part in content] if isinstance(content, list) else content


def _part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") in _TEXT_PARTS:
        return {"type": "text", "text": part.get("text")}
    if part.get("type") == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if part.get("type") == "input_image" and isinstance(part.get("file_id"), str):
        return {"type": "file", "file": {"file_id": part["file_id"]}}
    if part.get("type") == "input_file" and not part.get("file_url"):
        names = ("file_id", "file_data", "filename")
        return {"type": "file", "file": {name: part[name] for name in names if part.get(name) is not None}}
    return part
