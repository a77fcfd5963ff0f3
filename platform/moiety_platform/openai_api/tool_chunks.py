"""Tool calls and reasoning in OpenAI's streamed chat answers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moiety_platform.openai_api.answer_types import CallDelta, ChatDelta
from moiety_platform.openai_api.answers import AnswerHead, chat_logprobs
from moiety_platform.openai_api.chunks import ChatChunks
from moiety_platform.openai_api.tool_message import finish_reason_of, new_call_id
from moiety_text.reasoning import AnswerReader
from moiety_text.tools.deltas import CallArguments, CallBegun, Content, Delta, Thinking
from moiety_wire.messages import Finished, TokenLogprob

_encode = msgspec.json.Encoder().encode


class ToolChunks(ChatChunks):
    """Encoder of `chat.completion.chunk` objects of an answer that may contain tool calls or reasoning.

    A call is sent when it is complete. An incomplete call is sent as content, as in an answer that is not streamed.
    """

    def __init__(self, head: AnswerHead, include_usage: bool, readers: Sequence[AnswerReader]) -> None:
        super().__init__(head, include_usage)
        self._readers = readers
        self._has_called = [False] * len(readers)

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'{"role":"assistant","content":null}', b"null", b"null")  # there may be no content

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        return self._chunks(index, self._readers[index].feed(text), logprobs)

    def closing(self, index: int, finished: Finished) -> bytes:
        rest = self._chunks(index, self._readers[index].end(), None)
        reason = finish_reason_of(finished, self._has_called[index])
        return rest + self._chunk(index, b"{}", b"null", _encode(reason))

    def _chunks(self, index: int, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Return a chunk for each delta that has fields.

        The first chunk has the logprobs, whose text may be held back.
        """
        told = [fields for delta in deltas if (fields := self._fields(index, delta))]
        if not told and logprobs is not None:
            told.append({})
        first = b"null" if logprobs is None else _encode(chat_logprobs(logprobs))
        return b"".join(
            self._chunk(index, _encode(fields), b"null" if number else first, b"null")
            for number, fields in enumerate(told)
        )

    def _fields(self, index: int, delta: Delta) -> ChatDelta:
        match delta:
            case Content(text):
                return {"content": text}
            case Thinking(text):
                return {"reasoning_content": text}
            case CallBegun(number, name):
                self._has_called[index] = True
                call: CallDelta = {
                    "index": number,
                    "id": new_call_id(),
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
                return {"tool_calls": [call]}
            case CallArguments(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}
            case _:
                return {}
