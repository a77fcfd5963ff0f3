"""Messages of a conversation in the form that a chat template takes: ids, results and arguments of calls.

Arguments of an earlier call are an object, or a text where they are not one, such as those of a call that was cut.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from typing import Any

import msgspec

Message = Mapping[str, Any]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_UNPARSED = "arguments"  # member of an object that has arguments which are no object


class ArgumentsForm(Enum):
    """Arguments of calls that a chat template renders."""

    ANY = "any"  # objects and texts
    OBJECT = "object"  # objects only
    TEXT = "text"  # texts only


class CallIds(Enum):
    """Ids of calls that a chat template takes."""

    CLIENT = "client"  # any id
    SHORT = "short"  # nine letters and digits
    NUMBERED = "numbered"  # functions.NAME:NUMBER, numbered over the conversation


def adapted_messages(
    messages: Sequence[Message],
    call_ids: CallIds,
    *,
    one_call_a_message: bool,
    results_in_calls: bool,
    arguments: ArgumentsForm,
) -> list[Message]:
    """Return the messages in a template's form, with the name of its tool in each result."""
    changed = list(_with_names(messages))
    if one_call_a_message:
        changed = list(_apart(changed))
    if call_ids is CallIds.SHORT:
        changed = [_with_short_ids(message) for message in changed]
    if call_ids is CallIds.NUMBERED:
        changed = list(_with_numbered_ids(changed))
    if results_in_calls:
        changed = list(_with_results(changed))
    if arguments is ArgumentsForm.ANY:
        return changed
    convert = _as_text if arguments is ArgumentsForm.TEXT else as_object
    return [_with_arguments(message, convert) for message in changed]


def _with_names(messages: Sequence[Message]) -> Iterator[Message]:
    names = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        name = names.get(message.get("tool_call_id")) if message["role"] == "tool" else None
        yield {"name": name, **message} if name is not None else message


def _apart(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield each call in its own message, followed by its result."""
    left = deque(messages)
    while left:
        message = left.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results = []
        while left and left[0]["role"] == "tool":
            results.append(left.popleft())
        for number, call in enumerate(calls):
            yield {**message, "tool_calls": [call], "content": "" if number else message["content"]}
            yield from [result for result in results if result["tool_call_id"] == call["id"]]
        made = {call["id"] for call in calls}
        yield from [result for result in results if result["tool_call_id"] not in made]


def _with_short_ids(message: Message) -> Message:
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
    return changed


def _short_id(call_id: str) -> str:
    """Return the id itself where it fits, otherwise one derived from it."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


def _with_numbered_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages with ids that name their tool and count the calls of the conversation."""
    number, numbered = 0, {}
    for message in messages:
        changed = dict(message)
        calls = []
        for call in message.get("tool_calls", ()):
            numbered[call["id"]] = f"functions.{call['function']['name']}:{number}"
            calls.append({**call, "id": numbered[call["id"]]})
            number += 1
        if calls:
            changed["tool_calls"] = calls
        if message.get("tool_call_id") in numbered:
            changed["tool_call_id"] = numbered[message["tool_call_id"]]
        yield changed


def _with_results(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield each message with calls together with the results that follow it."""
    left = deque(messages)
    while left:
        message = left.popleft()
        results = []
        while message.get("tool_calls") and left and left[0]["role"] == "tool":
            result = left.popleft()
            results.append({"name": result.get("name"), "response": result["content"]})
        yield {**message, "tool_responses": results} if results else message


def _with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
    """Return the message with converted arguments of its calls."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": convert(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def parsed_arguments(text: str) -> dict[str, Any] | str:
    """Return the arguments of a call as the object that the text holds, or the text where it holds none.

    An empty text means no arguments. A text without an object is that of a call that was cut, or badly written.
    """
    try:
        parsed = msgspec.json.decode(text) if text.strip() else {}
    except (ValueError, RecursionError):  # of JSON or of UTF-8
        return text
    return parsed if isinstance(parsed, dict) else text


def as_object(arguments: Any) -> Any:
    """Return the arguments of a call as an object, which has a text that is no object as its only member."""
    return {_UNPARSED: arguments} if isinstance(arguments, str) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
