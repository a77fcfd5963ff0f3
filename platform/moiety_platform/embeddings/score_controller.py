"""Endpoints `/v1/score`, `/v1/rerank` and `/v1/classify`, as vLLM, Jina and Cohere have them.

Each input is one sequence of the request, as for embeddings. A cross-encoder scores a pair as one sequence; with an
embedding model the score is the cosine of the vectors, and each distinct text is embedded once.
"""

from __future__ import annotations

import asyncio
from functools import partial

from litestar.handlers import HTTPRouteHandler

from moiety_platform.embeddings.score_answer_types import ClassificationList, RerankAnswer, ScoreList
from moiety_platform.embeddings.score_answers import PoolingResults, pooling_pieces
from moiety_platform.embeddings.score_schemas import ClassifyBody, PoolingBody, RerankBody, ScoreBody
from moiety_platform.embeddings.sending import send_pieces
from moiety_platform.embeddings.whole import collect
from moiety_platform.inference.endpoint import Endpoint, EndpointDocs, SendLast, Serve, route
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.response import HttpResponse
from moiety_platform.inference.run import InferenceRun


def score_routes(serve: Serve) -> list[HTTPRouteHandler]:
    """Return the handlers of the endpoints."""
    return [route(SCORE, serve), *(route(rerank, serve) for rerank in RERANKS), route(CLASSIFY, serve)]


async def _answer(body: PoolingBody, run: InferenceRun, record: RequestRecord, reply: HttpResponse) -> SendLast:
    pieces = pooling_pieces(body, PoolingResults.of_run(run, record, await collect(run)))
    if not isinstance(body, ClassifyBody):  # cosines take long
        pieces = iter(await asyncio.to_thread(list, pieces))
    return partial(send_pieces, pieces, record, reply)


SCORE = Endpoint(
    "/v1/score",
    "score",
    "score-",
    ScoreBody,
    _answer,
    EndpointDocs(
        tag="embeddings",
        summary="Score pairs of texts",
        detail="A cross-encoder's score of each pair, or the cosine of the vectors of an embedding model.",
        answer=ScoreList,
    ),
)
RERANKS = tuple(
    Endpoint(
        path,
        "rerank",
        "rerank-",
        RerankBody,
        _answer,
        EndpointDocs(
            tag="embeddings",
            summary="Order documents by their relevance to a query",
            detail="The request of Jina and Cohere. The most relevant documents come first.",
            answer=RerankAnswer,
        ),
    )
    for path in ("/v1/rerank", "/v2/rerank", "/rerank")
)
CLASSIFY = Endpoint(
    "/v1/classify",
    "classify",
    "classify-",
    ClassifyBody,
    _answer,
    EndpointDocs(
        tag="embeddings",
        summary="Classify texts",
        detail="The label and the probabilities of a classification model for each input.",
        answer=ClassificationList,
    ),
)
