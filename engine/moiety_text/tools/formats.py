"""Tool-call format of one model, derived from its chat template."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from moiety_text.tools.families import HermesReader, LlamaReader, MistralReader
from moiety_text.tools.offer import ToolOffer
from moiety_text.tools.reader import CallReader

Message = Mapping[str, Any]

KNOWN = "Hermes and Qwen, Mistral, or Llama 3 and 4"

_LLAMA_HEADS = ("<|start_header_id|>", "<|header_start|>")  # of a turn, with Llama 3 and 4
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class Opening:
    """Beginning of an answer that must call, in the model's format, with the client's `name` of the tool."""

    before: str = ""
    name: str = ""
    after: str = ""

    @property
    def text(self) -> str:
        return self.before + self.name + self.after


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Tool-call format of one model.

    `markers` mark its calls and may be special tokens. An answer that must call begins with `to_name` before the name
    and `to_arguments` after it.
    """

    reader: type[CallReader]
    markers: tuple[str, ...]
    to_name: str
    to_arguments: str
    to_end: str | None  # text after the arguments; None where a call contains more than this
    between: str = ""  # separator of calls after one marker
    closer: str = ""  # after the last of those calls
    marks_calls: bool = True  # otherwise a call is the whole answer, and recognized by its format
    short_ids: bool = False  # the template takes only ids of nine letters and digits
    one_call_a_message: bool = False

    def opening(self, offer: ToolOffer) -> Opening:
        """Return the opening of an answer; empty where the model is free to call or not."""
        if not offer.must_call:
            return Opening()
        name = offer.first_call
        return Opening(self.to_name) if name is None else Opening(self.to_name, name, self.to_arguments)

    def new_reader(self, offer: ToolOffer, *, is_rest: bool) -> CallReader:
        """Return a reader for an answer to a prompt that ends with the opening.

        `is_rest`: the client has begun the answer.
        """
        reader = self.reader(offer.names, offer.max_calls, is_rest=is_rest)
        deltas = reader.feed(self.opening(offer).text)
        assert not deltas, "an opening ends before the name and the arguments of a call"
        return reader

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in this template's form: results with their tool's name, ids and calls in its format."""
        named = list(_with_names(messages))
        if self.one_call_a_message:
            named = list(_apart(named))
        return [_with_short_ids(message) for message in named] if self.short_ids else named


def format_of(template: str) -> ToolFormat | None:
    """Return the format that the chat template implies.

    None where it is unknown, or where the template would omit the calls of earlier answers.
    """
    if "tool_calls" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return _mistral(template)
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        markers = ("<tool_call>", "</tool_call>")
        return ToolFormat(HermesReader, markers, '<tool_call>\n{"name": "', '", "arguments":', "}\n</tool_call>")
    if '{"name": "' in template and '"parameters": ' in template and any(head in template for head in _LLAMA_HEADS):
        one_call = "single tool-calls" in template
        return ToolFormat(
            LlamaReader,
            ("<|python_tag|>",),
            '{"name": "',
            '", "parameters":',
            "}",
            between="; ",
            marks_calls=False,
            one_call_a_message=one_call,
        )
    return None


def _mistral(template: str) -> ToolFormat:
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    short_ids = "length 9" in template or "length != 9" in template
    if "[ARGS]" in template:
        has_ids = "[CALL_ID]" in template
        to_arguments, to_end = ("", None) if has_ids else ("[ARGS]", "")
        return ToolFormat(MistralReader, markers, "[TOOL_CALLS]", to_arguments, to_end, short_ids=short_ids)
    to_list = "[TOOL_CALLS] [" if "[TOOL_CALLS] [" in template else "[TOOL_CALLS]["
    return ToolFormat(
        MistralReader,
        markers,
        to_list + '{"name": "',
        '", "arguments":',
        "}",
        between=", ",
        closer="]",
        short_ids=short_ids,
    )


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
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]
