"""An answer of text, whole or streamed, in whichever API's words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from moiety_platform.completions.answers import AnswerChoice
from moiety_platform.completions.body_fields import GeneratingBody
from moiety_platform.completions.handler import SendLast
from moiety_platform.completions.request_record import RequestRecord
from moiety_platform.completions.response import HttpResponse
from moiety_platform.completions.run import Run
from moiety_platform.completions.sse import Chunks, Pieces
from moiety_platform.completions.whole_answer import collect
from moiety_wire.messages import Finished

KEEP_ALIVE = b":\n\n"  # a comment, which readers of event streams pass over
MAX_SILENT_PIECES = 64  # after which a stream says that it is alive, since a call is told once it is whole

Body = TypeVar("Body", bound=GeneratingBody)


@dataclass(frozen=True, slots=True)
class TextAnswer(Generic[Body]):
    """How an endpoint answers with text: `whole` makes the body of an answer that is not streamed, `chunks` the events
    of one that is."""

    whole: Callable[[Body, Run, RequestRecord, Sequence[AnswerChoice]], Awaitable[bytes]]
    chunks: Callable[[Body, Run, RequestRecord], Awaitable[Chunks]]

    async def __call__(self, body: Body, run: Run, record: RequestRecord, reply: HttpResponse) -> SendLast:
        if body.wants_stream:
            chunks = await self.chunks(body, run, record)
            await relay(chunks, run, record, reply)
            return partial(reply.end_stream, chunks.end(run.usage()))
        return partial(reply.whole, 200, await self.whole(body, run, record, await collect(run)))


async def relay(chunks: Pieces, run: Run, record: RequestRecord, reply: HttpResponse) -> None:
    """Stream all choices as they come, to their end. The answer starts with the first tokens, so that a request which
    an engine refuses still gets its proper status."""
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
