"""The events of a streamed response, in OpenAI's order, each with the next number of its sequence.

What all deltas of a message share is encoded once; a delta costs the encoding of its text and one join.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moiety_platform.errors import PlatformError
from moiety_platform.http_errors import OpenAIErrors
from moiety_platform.responses_api.answers import ResponseHead, logprob_fields, output_message
from moiety_platform.responses_api.items import Item, message_item, text_part
from moiety_wire.messages import Finished, TokenLogprob

_encode = msgspec.json.Encoder().encode


class ResponseEvents:
    """Encodes the events of one response, and remembers what came of it. Owned by whoever answers the request."""

    def __init__(self, head: ResponseHead) -> None:
        self.head = head
        self.output: list[Item] = []  # items that are whole
        self.finished: Finished | None = None
        self._number = 0
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._place = {"item_id": head.message_id, "output_index": 0, "content_index": 0}
        self._delta_start = (
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
            + _encode(self._place)[1:-1]
            + b',"delta":'
        )

    def opening(self, index: int) -> bytes:
        response = {"response": self.head.in_progress()}
        return b"".join(
            (
                self.event("response.created", response),
                self.event("response.in_progress", response),
                self._of_item("response.output_item.added", {"id": self.head.message_id, **_begun()}),
                self.event("response.content_part.added", {**self._place, "part": text_part("")}),
            )
        )

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        self._text.append(text)
        encoded = b"[]"
        if logprobs:
            self._logprobs += logprobs
            encoded = _encode(logprob_fields(logprobs))
        return b'%b%b,"logprobs":%b,"sequence_number":%d}\n\n' % (
            self._delta_start, _encode(text), encoded, self._next(),
        )  # fmt: skip

    def closing(self, index: int, finished: Finished) -> bytes:
        self.finished = finished
        item = output_message(self.head, "".join(self._text), self._logprobs, finished)
        self.output.append(item)
        (part,) = item["content"]
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        return b"".join(
            (
                self.event("response.output_text.done", {**self._place, **text}),
                self.event("response.content_part.done", {**self._place, "part": part}),
                self._of_item("response.output_item.done", item),
            )
        )

    def end(self, response: bytes) -> bytes:
        """What the stream ends with, given the response as it ended."""
        status = msgspec.json.decode(response, type=_Status).status
        return self.event(f"response.{status}", {"response": msgspec.Raw(response)})

    def event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = _encode({"type": kind, **fields, "sequence_number": self._next()})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _of_item(self, kind: str, item: Item) -> bytes:
        return self.event(kind, {"output_index": 0, "item": item})

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


class _Status(msgspec.Struct):
    status: str


class StreamErrors(OpenAIErrors):
    """OpenAI's form of an error; in the response's stream, an `error` event with our code and `response.failed`."""

    def __init__(self, events: ResponseEvents) -> None:
        self._events = events

    def event(self, error: PlatformError, request_id: str) -> bytes:
        events = self._events
        told = {"code": error.code, "message": error.message, "param": error.param}
        failed = events.head.failed(events.output, error)
        return events.event("error", told) + events.event("response.failed", {"response": failed})


def _begun() -> Item:
    return message_item([], "in_progress")
