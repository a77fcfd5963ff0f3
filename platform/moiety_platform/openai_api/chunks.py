"""Server-sent events: the encoded chunks of OpenAI's streamed answers.

The parts that all chunks of a request share are encoded once. A chunk costs the encoding of its text and one join.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moiety_platform.inference.run import Usage
from moiety_platform.openai_api.answers import AnswerHead, chat_logprobs, usage_fields
from moiety_platform.openai_api.text_logprobs import TextOffsets, text_logprobs
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
        delta = b'{"content":' + _encode(text) + b"}"
        return self._chunk(index, delta, b"null" if logprobs is None else _encode(chat_logprobs(logprobs)), b"null")

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
