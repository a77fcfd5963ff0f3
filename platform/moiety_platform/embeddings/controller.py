"""HTTP to the pipeline and back: `/v1/embeddings`.

Every input is a sequence of the request, under the same admission, limits and prices as a prompt of which nothing is
generated.
"""

from __future__ import annotations

from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive

from moiety_platform.completions.controller import CompletionServices, Endpoint, Exchange, answer_headers
from moiety_platform.completions.disconnect import watching_for_disconnect
from moiety_platform.completions.record import RequestRecord
from moiety_platform.completions.reply import Reply
from moiety_platform.completions.run import Run
from moiety_platform.embeddings.answers import answer_pieces
from moiety_platform.embeddings.schemas import EmbeddingBody
from moiety_wire.messages import Finished

EMBEDDINGS = Endpoint("/v1/embeddings", "embeddings", "embd-", EmbeddingBody)


def embedding_route(services: CompletionServices) -> HTTPRouteHandler:
    """The handler of the endpoint."""

    @post(EMBEDDINGS.path, name=EMBEDDINGS.operation)
    async def create(request: Request[Any, Any, Any]) -> ASGIApp:
        return _Embedding(EMBEDDINGS, services)

    return create


class _Embedding(Exchange[EmbeddingBody]):
    async def answer(self, body: EmbeddingBody, record: RequestRecord, receive: Receive, reply: Reply) -> None:
        async with (
            watching_for_disconnect(receive),
            self._services.pipeline.run(record, body.generation()) as run,
        ):
            reply.headers = answer_headers(record)
            vectors = await _collect(run)
        record.completed()
        record.answered_status = 200
        await reply.pieces(
            answer_pieces(
                vectors,
                model=record.served_model,
                usage=run.usage(),
                dimensions=body.dimensions,
                as_base64=body.encoding_format == "base64",
            )
        )


async def _collect(run: Run) -> list[bytes]:
    """Wait for the vectors of all inputs, in their order."""
    vectors = [b""] * len(run.streams)
    async for index, message in run:
        if isinstance(message, Finished):
            vectors[index] = message.embedding
    return vectors
