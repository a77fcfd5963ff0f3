"""Events of a streamed response, in OpenAI's order, with consecutive sequence numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from moiety_platform.errors import PlatformError
from moiety_platform.http_errors import OpenAIErrors
from moiety_platform.openai_api.answers import chat_logprobs
from moiety_platform.responses_api.answers import ResponseHead
from moiety_platform.responses_api.event_log import EventLog
from moiety_platform.responses_api.items import CALL, CUSTOM_CALL, MESSAGE, SHELL_CALL, THOUGHT, Item, text_part
from moiety_platform.responses_api.output import (
    ItemBegun,
    ItemEnded,
    MoreArguments,
    MoreInput,
    MoreText,
    MoreThought,
    ResponseOutput,
    Step,
)
from moiety_wire.messages import Finished, TokenLogprob

_TEXT = "response.output_text"
_THOUGHT = "response.reasoning_text"
_ARGUMENTS = "response.function_call_arguments"
_INPUT = "response.custom_tool_call_input"
_COMMAND = "response.shell_call_command"

_encode = msgspec.json.Encoder().encode


class ResponseEvents:
    """Encoder of one response's events. Owned by the handler of the request."""

    def __init__(self, head: ResponseHead, output: ResponseOutput) -> None:
        self._head = head
        self._output = output
        self._number = 0
        self._place: dict[str, Any] = {"item_id": "", "output_index": -1}  # of the item in progress
        self._delta_start = b""

    def opening(self, index: int) -> bytes:
        response = {"response": self._head.in_progress()}
        return self.event("response.created", response) + self.event("response.in_progress", response)

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        return b"".join(map(self._of, self._output.take(text, logprobs)))

    def closing(self, index: int, finished: Finished) -> bytes:
        return b"".join(map(self._of, self._output.end(finished)))

    def end(self, response: bytes) -> bytes:
        """Return the last event of the stream for the ended response."""
        return ending_event(response, self._number)

    def failed(self, error: PlatformError) -> bytes:
        """Return the last events of a stream that fails."""
        told = self.failing(error)
        return told + self.event("response.failed", {"response": self._head.failed(self._output.items, error)})

    def failing(self, error: PlatformError) -> bytes:
        """Return the event of the error that a stream fails with."""
        self._number += 1
        return error_event(error, self._number - 1)

    def event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._number += 1
        return _event(kind, fields, self._number - 1)

    def _of(self, step: Step) -> bytes:
        match step:
            case MoreText(text, logprobs):
                return self._more_text(text, logprobs)
            case MoreThought(text):
                return self.event(f"{_THOUGHT}.delta", {**self._place, "content_index": 0, "delta": text})
            case MoreArguments(text):
                return self.event(f"{_ARGUMENTS}.delta", {**self._place, "delta": text})
            case MoreInput(text):
                return self.event(f"{_INPUT}.delta", {**self._place, "delta": text})
            case ItemBegun(item):
                return self._begun(item)
            case ItemEnded(item):
                return self._ended(item)

    def _more_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return a text delta.

        The fields common to all deltas of a message are encoded once, since there are many deltas.
        """
        encoded = _encode(chat_logprobs(logprobs)["content"]) if logprobs else b"[]"
        self._number += 1
        return b'%b%b,"logprobs":%b,"sequence_number":%d}\n\n' % (
            self._delta_start, _encode(text), encoded, self._number - 1,
        )  # fmt: skip

    def _begun(self, item: Item) -> bytes:
        index = self._place["output_index"] + 1
        self._place = {"item_id": item["id"], "output_index": index}
        shared = _encode({"type": f"{_TEXT}.delta", **self._place, "content_index": 0})
        self._delta_start = b"event: %b.delta\ndata: %b," % (_TEXT.encode(), shared[:-1]) + b'"delta":'
        added = self.event("response.output_item.added", {"output_index": index, "item": item})
        if item["type"] != MESSAGE:
            return added
        part = {**self._place, "content_index": 0, "part": text_part("")}
        return added + self.event("response.content_part.added", part)

    def _ended(self, item: Item) -> bytes:
        if item["type"] == CALL:
            told = {"name": item["name"], "arguments": item["arguments"]}
            done = self.event(f"{_ARGUMENTS}.done", {**self._place, **told})
        elif item["type"] == THOUGHT:
            told = {"content_index": 0, "text": item["content"][0]["text"]}
            done = self.event(f"{_THOUGHT}.done", {**self._place, **told})
        elif item["type"] == CUSTOM_CALL:
            done = self.event(f"{_INPUT}.done", {**self._place, "input": item["input"]})
        elif item["type"] == SHELL_CALL:
            done = b"".join(self._command(number, text) for number, text in enumerate(item["action"]["commands"]))
        elif item["type"] != MESSAGE:
            done = b""
        else:
            (part,) = item["content"]
            place = {**self._place, "content_index": 0}
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            done = self.event(f"{_TEXT}.done", {**place, **text})
            done += self.event("response.content_part.done", {**place, "part": part})
        whole = {"output_index": self._place["output_index"], "item": item}
        return done + self.event("response.output_item.done", whole)

    def _command(self, number: int, text: str) -> bytes:
        """Return the events of one command of a shell call."""
        place = {"output_index": self._place["output_index"], "command_index": number}
        added = self.event(f"{_COMMAND}.added", {**place, "command": ""})
        delta = self.event(f"{_COMMAND}.delta", {**place, "delta": text})
        return added + delta + self.event(f"{_COMMAND}.done", {**place, "command": text})


class LoggedEvents(ResponseEvents):
    """Encoder that also adds all events but the last one to a log, from which the stream can be resumed."""

    def __init__(self, head: ResponseHead, output: ResponseOutput, log: EventLog) -> None:
        super().__init__(head, output)
        self._log = log

    def opening(self, index: int) -> bytes:
        return self._logged(super().opening(index))

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        return self._logged(super().piece(index, text, logprobs))

    def closing(self, index: int, finished: Finished) -> bytes:
        return self._logged(super().closing(index, finished))

    def failing(self, error: PlatformError) -> bytes:
        return self._logged(super().failing(error))

    def _logged(self, data: bytes) -> bytes:
        self._log.add(data, self._number)
        return data


class _Status(msgspec.Struct):
    status: str


def ending_event(response: bytes, number: int) -> bytes:
    """Return the last event of a stream. A cancelled response has no event of its own, and ends as a failed one."""
    status = msgspec.json.decode(response, type=_Status).status
    status = "failed" if status == "cancelled" else status
    return _event(f"response.{status}", {"response": msgspec.Raw(response)}, number)


def error_event(error: PlatformError, number: int | None) -> bytes:
    """Return the event that a stream has failed, without a sequence number if that is None."""
    return _event("error", {"code": error.code, "message": error.message, "param": error.param}, number)


def _event(kind: str, fields: dict[str, Any], number: int | None) -> bytes:
    numbered = {} if number is None else {"sequence_number": number}
    data = _encode({"type": kind, **fields, **numbered})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class StreamErrors(OpenAIErrors):
    """Errors in OpenAI's format. In a response's stream, an `error` event with our code and then `response.failed`."""

    def __init__(self, events: ResponseEvents, on_error: Callable[[PlatformError], None]) -> None:
        self._events = events
        self._on_error = on_error

    def event(self, error: PlatformError, request_id: str) -> bytes:
        self._on_error(error)
        return self._events.failed(error)
