"""Text answers, complete or streamed, in any API's format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from moiety_platform.inference.answer_collection import AnswerChoice, collect, end_without_output
from moiety_platform.inference.body_fields import GeneratingBody
from moiety_platform.inference.endpoint import SendLast
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.response import HttpResponse
from moiety_platform.inference.run import InferenceRun, Usage
from moiety_wire.messages import Finished, TokenLogprob

KEEP_ALIVE = b":\n\n"  # a comment, which event stream parsers ignore
MAX_SILENT_PIECES = 64  # then a keep-alive is sent, since a tool call is sent only when complete

Body = TypeVar("Body", bound=GeneratingBody)


class DeltaEncoder(Protocol):
    """Encoder of one streamed answer, except for its end."""

    def opening(self, index: int) -> bytes:
        """Return the beginning of a choice, which may be empty."""
        ...

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes: ...

    def closing(self, index: int, finished: Finished) -> bytes:
        """Return the end of a choice."""
        ...


class StreamEncoder(DeltaEncoder, Protocol):
    """Encoder of one streamed answer."""

    def end(self, usage: Usage) -> bytes:
        """Return the end of the stream. `usage` is the total of all choices."""
        ...


class WithheldOutput:
    """Encoder of a streamed answer to a request for no output: the beginning and the end of each choice."""

    def __init__(self, chunks: StreamEncoder) -> None:
        self._chunks = chunks

    def opening(self, index: int) -> bytes:
        return self._chunks.opening(index)

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        return b""

    def closing(self, index: int, finished: Finished) -> bytes:
        return self._chunks.closing(index, end_without_output(finished))

    def end(self, usage: Usage) -> bytes:
        return self._chunks.end(usage)


@dataclass(frozen=True, slots=True)
class TextAnswer(Generic[Body]):
    """Text answer of an endpoint.

    `whole` builds the body of an answer that is not streamed, `chunks` the events of a streamed one.
    """

    whole: Callable[[Body, InferenceRun, RequestRecord, Sequence[AnswerChoice]], Awaitable[bytes]]
    chunks: Callable[[Body, InferenceRun, RequestRecord], Awaitable[StreamEncoder]]

    async def __call__(self, body: Body, run: InferenceRun, record: RequestRecord, reply: HttpResponse) -> SendLast:
        if body.wants_stream:
            chunks = await self.chunks(body, run, record)
            await relay(chunks, run, record, reply)
            return partial(reply.end_stream, chunks.end(run.usage()))
        return partial(reply.whole, 200, await self.whole(body, run, record, await collect(run)))


async def relay(chunks: DeltaEncoder, run: InferenceRun, record: RequestRecord, reply: HttpResponse) -> None:
    """Stream all choices as they arrive, to their end.

    The answer starts with the first tokens, so that a request that an engine refuses still gets its proper status.
    """
    opened = [False] * run.num_sequences
    num_silent = 0
    async for index, message in run:
        parts: list[bytes] = []
        if not opened[index]:
            opened[index] = True
            parts.append(chunks.opening(index))
        if isinstance(message, Finished):
            if message.text:
                parts.append(chunks.piece(index, message.text, None))
            parts.append(chunks.closing(index, message))
        elif message.text or message.logprobs:
            parts.append(chunks.piece(index, message.text, message.logprobs))
        data = b"".join(parts)
        num_silent = 0 if data else num_silent + 1
        if num_silent == MAX_SILENT_PIECES:
            data, num_silent = KEEP_ALIVE, 0
        if data:
            record.answered_status = 200
            await reply.stream(data)
