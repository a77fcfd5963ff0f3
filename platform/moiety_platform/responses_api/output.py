"""Items of one response, built incrementally from the answer's text. Independent of events and HTTP.

Without tools there is one message. With tools there is a message for each run of text and an item for each call. The
reasoning comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moiety_platform.openai_api.answers import chat_logprobs
from moiety_platform.openai_api.tool_message import new_call_id
from moiety_platform.responses_api.calls import OfferedTool, ToolKind, call_item_of
from moiety_platform.responses_api.items import (
    CALL,
    CUSTOM_CALL,
    MESSAGE,
    THOUGHT,
    Item,
    call_item,
    message_item,
    text_part,
    thought_item,
    with_id,
)
from moiety_text.reasoning import AnswerReader
from moiety_text.tools.deltas import CallArguments, CallBegun, CallEnded, Content, Delta, Thinking
from moiety_wire.messages import Finished, FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class ItemBegun:
    """A new item: a message without parts, or a call without arguments."""

    item: Item


@dataclass(frozen=True, slots=True)
class MoreText:
    text: str
    logprobs: Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str


class MoreThought(_Piece):
    """More of the reasoning."""

    __slots__ = ()


class MoreArguments(_Piece):
    """More of a function call's arguments."""

    __slots__ = ()


class MoreInput(_Piece):
    """More of a custom tool's input."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ItemEnded:
    """A complete item as it is stored."""

    item: Item


Step = ItemBegun | MoreText | MoreThought | MoreArguments | MoreInput | ItemEnded  # one item at a time


@dataclass(slots=True)
class _PendingCall:
    """A call of a tool that is not a function, until its arguments are complete."""

    tool: OfferedTool
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    """An item in progress."""

    item: Item
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def ended(self, status: str) -> Item:
        text = "".join(self.text)
        if self.item["type"] == CALL:
            return {**self.item, "status": status, "arguments": text}
        if self.item["type"] == THOUGHT:
            return {**thought_item(text, status), "id": self.item["id"]}
        logprobs = chat_logprobs(self.logprobs)["content"]
        return {**self.item, "status": status, "content": [text_part(text, logprobs)]}


class ResponseOutput:
    """Output of a response so far.

    `items` are the complete items. `reader` finds calls in the text, and is None without tools. `tools` are the offered
    ones by the model's name for them. A call becomes an item when it is complete, and an incomplete call becomes text.
    So does a call that has no form in the API, such as a patch without a path. The log probabilities of a text are
    those of all tokens since the previous text. Calls have none. `encrypt` encrypts reasoning where that is requested.
    """

    def __init__(
        self,
        response_id: str,
        reader: AnswerReader | None,
        tools: Mapping[str, OfferedTool],
        encrypt: Callable[[str], str] | None = None,
    ) -> None:
        self.items: list[Item] = []
        self.finished: Finished | None = None
        self._response_id = response_id
        self._reader = reader
        self._tools = tools
        self._encrypt = encrypt
        self._open: _Open | None = None
        self._call: _PendingCall | None = None
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is still held back
        self._latest: list[TokenLogprob] = []  # those of them that came with the last text

    def take(self, text: str, logprobs: Sequence[TokenLogprob] | None) -> list[Step]:
        """Add text and return the resulting steps."""
        self._latest = list(logprobs or ())
        self._logprobs += self._latest
        if self._reader is None:
            return self._told(text)
        return [step for delta in self._reader.feed(text) for step in self._of(delta)]

    def end(self, finished: Finished) -> list[Step]:
        """End the output and return the remaining steps. There is at least one item, if only an empty message."""
        self.finished = finished
        steps = [] if self._reader is None else [step for delta in self._reader.end() for step in self._of(delta)]
        if not self.items and self._open is None:
            steps += self._begin(message_item([]))
        return steps + self._close("completed" if finished.reason is FinishReason.STOP else "incomplete")

    def _of(self, delta: Delta) -> list[Step]:
        match delta:
            case Content(text):
                return self._told(text)
            case Thinking(text):
                steps = [] if self._is_open(THOUGHT) else self._begin(thought_item(None))
                assert self._open is not None, "just begun, if it was not"
                self._open.text.append(text)
                return [*steps, MoreThought(text)]
            case CallBegun(_, name):
                return self._begin_call(self._tools[name])
            case CallArguments(_, text):
                return self._more_arguments(text)
            case CallEnded():
                call, self._call = self._call, None
                return self._close("completed") if call is None else self._called(call)

    def _begin_call(self, tool: OfferedTool) -> list[Step]:
        if tool.kind is ToolKind.FUNCTION:
            return self._begin(call_item(new_call_id(), tool.name, "", tool.namespace))
        self._call = _PendingCall(tool)
        return []

    def _more_arguments(self, text: str) -> list[Step]:
        if self._call is not None:
            self._call.arguments.append(text)
            return []
        assert self._open is not None, "a call that has arguments has begun"
        self._open.text.append(text)
        return [MoreArguments(text)]

    def _called(self, call: _PendingCall) -> list[Step]:
        """Return the steps of a complete call of a tool that is not a function."""
        arguments = "".join(call.arguments)
        item = call_item_of(call.tool, new_call_id(), arguments)
        if item is None:
            return self._told(f"{call.tool.tool.name}({arguments})")
        steps, item = self._close("completed"), self._with_id(item)
        self._logprobs = []
        self.items.append(item)
        if item["type"] != CUSTOM_CALL:
            return [*steps, ItemBegun({**item, "status": "in_progress"}), ItemEnded(item)]
        begun = {**item, "status": "in_progress", "input": ""}
        return [*steps, ItemBegun(begun), MoreInput(item["input"]), ItemEnded(item)]

    def _told(self, text: str) -> list[Step]:
        steps: list[Step] = []
        if not self._is_open(MESSAGE):
            ends_other = self._open is not None  # reasoning or a call, whose tokens are no text
            steps = self._begin(message_item([]))
            if ends_other:
                self._logprobs = self._latest
        assert self._open is not None, "just begun, if it was not"
        logprobs, self._logprobs, self._latest = self._logprobs, [], []
        self._open.text.append(text)
        self._open.logprobs += logprobs
        return [*steps, MoreText(text, logprobs)]

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open.item["type"] == kind

    def _begin(self, item: Item) -> list[Step]:
        steps = self._close("completed")
        self._open = _Open(self._with_id({**item, "status": "in_progress"}))
        return [*steps, ItemBegun(self._open.item)]

    def _with_id(self, item: Item) -> Item:
        return with_id(item, self._response_id, len(self.items))

    def _close(self, status: str) -> list[Step]:
        if self._open is None:
            return []
        item = self._open.ended(status)
        if item["type"] == THOUGHT and self._encrypt is not None:
            item["encrypted_content"] = self._encrypt(item["content"][0]["text"])
        if not self._is_open(MESSAGE):
            self._logprobs = []
        self._open = None
        self.items.append(item)
        return [ItemEnded(item)]
