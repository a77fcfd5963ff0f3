"""OpenAI's `/v1/embeddings` endpoint.

Each input is one sequence of the request. Admission, quotas and prices are those of a prompt without generated tokens.
"""

from __future__ import annotations

from functools import partial

from litestar.handlers import HTTPRouteHandler

from moiety_platform.embeddings.answer_types import EmbeddingList
from moiety_platform.embeddings.schemas import EmbeddingBody
from moiety_platform.embeddings.sending import send_pieces
from moiety_platform.embeddings.whole import collect, pieces_of
from moiety_platform.inference.endpoint import Endpoint, EndpointDocs, SendLast, Serve, route
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.response import HttpResponse
from moiety_platform.inference.run import InferenceRun


def embedding_route(serve: Serve) -> HTTPRouteHandler:
    """Return the handler of the endpoint."""
    return route(EMBEDDINGS, serve)


async def _answer(body: EmbeddingBody, run: InferenceRun, record: RequestRecord, reply: HttpResponse) -> SendLast:
    return partial(send_pieces, pieces_of(body, run, record, await collect(run)), record, reply)


EMBEDDINGS = Endpoint(
    "/v1/embeddings",
    "embeddings",
    "embd-",
    EmbeddingBody,
    _answer,
    EndpointDocs(
        tag="embeddings",
        summary="Compute embeddings of texts",
        detail="OpenAI's Embeddings API: one vector for each input.",
        answer=EmbeddingList,
    ),
)
