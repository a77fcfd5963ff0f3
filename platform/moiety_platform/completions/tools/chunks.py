"""Calls of tools in OpenAI's streamed answers to chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moiety_platform.completions.answers import AnswerHead, chat_logprobs
from moiety_platform.completions.sse import ChatChunks
from moiety_platform.completions.tools.message import finish_reason_of, new_call_id
from moiety_text.tools.deltas import CallArguments, CallBegun, Content, Delta
from moiety_text.tools.reader import CallReader
from moiety_wire.messages import Finished, TokenLogprob

_encode = msgspec.json.Encoder().encode


class ToolChunks(ChatChunks):
    """`chat.completion.chunk` objects of an answer that may call. A call that breaks off stays as it was told, and what
    the model wrote after it is content."""

    def __init__(self, head: AnswerHead, include_usage: bool, readers: Sequence[CallReader]) -> None:
        super().__init__(head, include_usage)
        self._readers = readers
        self._has_called = [False] * len(readers)

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'{"role":"assistant","content":null}', b"null", b"null")  # there may never be any

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        chunks = [self._delta_of(index, delta) for delta in self._readers[index].feed(text)]
        if logprobs is not None:  # of tokens whose text may be held back, or be part of a call
            chunks.append(self._chunk(index, b"{}", _encode(chat_logprobs(logprobs)), b"null"))
        return b"".join(chunks)

    def closing(self, index: int, finished: Finished) -> bytes:
        rest = b"".join([self._delta_of(index, delta) for delta in self._readers[index].end()])
        reason = finish_reason_of(finished, self._has_called[index])
        return rest + self._chunk(index, b"{}", b"null", _encode(reason))

    def _delta_of(self, index: int, delta: Delta) -> bytes:
        match delta:
            case Content(text):
                return self._chunk(index, b'{"content":' + _encode(text) + b"}", b"null", b"null")
            case CallBegun(number, name):
                self._has_called[index] = True
                function = {"name": name, "arguments": ""}
                return self._call(
                    index, {"index": number, "id": new_call_id(), "type": "function", "function": function}
                )
            case CallArguments(number, text):
                return self._call(index, {"index": number, "function": {"arguments": text}})
            case _:
                return b""

    def _call(self, index: int, call: dict[str, Any]) -> bytes:
        return self._chunk(index, b'{"tool_calls":[' + _encode(call) + b"]}", b"null", b"null")
