"""Server-sent events: the encoded chunks of OpenAI's streamed answers.

The parts that all chunks of a request share are encoded once. A chunk costs the encoding of its text and one join.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import InferenceRun, Usage
from moiety_platform.openai_api.answer_types import CallDelta, ChatDelta
from moiety_platform.openai_api.answers import AnswerHead, chat_logprobs, head_of, usage_fields
from moiety_platform.openai_api.schemas import ChatBody
from moiety_platform.openai_api.text_logprobs import TextOffsets, text_logprobs
from moiety_platform.openai_api.tool_message import finish_reason_of, new_call_id
from moiety_text.reasoning import AnswerReader
from moiety_text.tools.deltas import CallArguments, CallBegun, Content, Delta, Thinking
from moiety_wire.messages import Finished, TokenLogprob

DONE_DATA = "[DONE]"
DONE = f"data: {DONE_DATA}\n\n".encode()

_encode = msgspec.json.Encoder().encode


class _ChunkFrame:
    """The encoded parts around `choices` that every chunk of a request repeats."""

    def __init__(self, head: AnswerHead, kind: str, include_usage: bool) -> None:
        self._include_usage = include_usage
        self.start = b"data: " + _encode(head.fields(kind))[:-1] + b',"choices":['
        self.end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def end_stream(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return b"".join((self.start, b'],"usage":', _encode(usage_fields(usage)), b"}\n\n", DONE))


class ChatChunks:
    """Encoder of `chat.completion.chunk` objects."""

    def __init__(self, head: AnswerHead, include_usage: bool) -> None:
        self._frame = _ChunkFrame(head, "chat.completion.chunk", include_usage)

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'{"role":"assistant","content":""}', b"null", b"null")

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        if logprobs is None:  # the common case
            return b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b' % (
                self._frame.start, index, _encode(text), self._frame.end,
            )  # fmt: skip
        return self._chunk(index, b'{"content":' + _encode(text) + b"}", _encode(chat_logprobs(logprobs)), b"null")

    def closing(self, index: int, finished: Finished) -> bytes:
        return self._chunk(index, b"{}", b"null", _encode(finished.reason.value))

    def end(self, usage: Usage) -> bytes:
        return self._frame.end_stream(usage)

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._frame.start, index, delta, logprobs, finish_reason, self._frame.end,
        )  # fmt: skip


class CompletionChunks:
    """Encoder of streamed `text_completion` objects. `echoes` are the texts that the choices begin with."""

    def __init__(self, head: AnswerHead, include_usage: bool, echoes: Sequence[str]) -> None:
        self._frame = _ChunkFrame(head, "text_completion", include_usage)
        self._echoes = echoes
        self._offsets = [TextOffsets(len(echo)) for echo in echoes]

    def opening(self, index: int) -> bytes:
        return self.piece(index, self._echoes[index], None) if self._echoes[index] else b""

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        encoded = b"null"
        if logprobs is not None:
            encoded = _encode(text_logprobs(logprobs, self._offsets[index]))
        return self._chunk(index, _encode(text), encoded, b"null")

    def closing(self, index: int, finished: Finished) -> bytes:
        return self._chunk(index, b'""', b"null", _encode(finished.reason.value))

    def end(self, usage: Usage) -> bytes:
        return self._frame.end_stream(usage)

    def _chunk(self, index: int, text: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._frame.start, index, text, logprobs, finish_reason, self._frame.end,
        )  # fmt: skip


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


async def chat_chunks(body: ChatBody, run: InferenceRun, record: RequestRecord) -> ChatChunks:
    """Return the encoder of a streamed chat answer."""
    head, readers = head_of(run, record), run.new_readers()
    return ChatChunks(head, body.include_usage) if readers is None else ToolChunks(head, body.include_usage, readers)
