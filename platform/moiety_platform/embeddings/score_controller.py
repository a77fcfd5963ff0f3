"""Endpoints `/v1/score`, `/v1/rerank` and `/v1/classify`, as vLLM, Jina and Cohere have them.

Each input is one sequence of the request, as for embeddings. A cross-encoder scores a pair as one sequence; with an
embedding model the score is the cosine of the vectors, and each distinct text is embedded once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from litestar.handlers import HTTPRouteHandler

from moiety_platform.embeddings.score_answer_types import (
    Classification,
    ClassificationList,
    PoolingUsage,
    RerankAnswer,
    RerankResult,
    ScoreList,
)
from moiety_platform.embeddings.score_schemas import ClassifyBody, RerankBody, ScoreBody
from moiety_platform.embeddings.scores import activated, cosines, numbers_of
from moiety_platform.embeddings.whole import collect
from moiety_platform.inference.body_fields import AskingBody
from moiety_platform.inference.endpoint import Endpoint, EndpointDocs, SendLast, Serve, route
from moiety_platform.inference.generation import TextPair
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.response import HttpResponse
from moiety_platform.inference.run import InferenceRun

Body = TypeVar("Body", bound=AskingBody)
Build = Callable[[Body, InferenceRun, RequestRecord, list[bytes]], Any]


def score_routes(serve: Serve) -> list[HTTPRouteHandler]:
    """Return the handlers of the endpoints."""
    return [route(SCORE, serve), *(route(rerank, serve) for rerank in RERANKS), route(CLASSIFY, serve)]


def _scores_of(
    body: ScoreBody | RerankBody, run: InferenceRun, record: RequestRecord, found: list[bytes]
) -> list[float]:
    assert record.generation is not None, "known before the request is submitted"
    prompts = record.generation.prompts
    if isinstance(prompts[0], TextPair):
        return [activated(numbers_of(logit), run.text.score_activation)[0] for logit in found]
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return cosines(body.pairs(), dict(zip(texts, found, strict=True)))


def _usage_of(run: InferenceRun) -> PoolingUsage:
    num_tokens = run.usage().prompt_tokens
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _score(body: ScoreBody, run: InferenceRun, record: RequestRecord, found: list[bytes]) -> ScoreList:
    return {
        "id": record.request_id,
        "object": "list",
        "created": int(time.time()),
        "model": record.served_model,
        "data": [
            {"object": "score", "index": index, "score": score}
            for index, score in enumerate(_scores_of(body, run, record, found))
        ],
        "usage": _usage_of(run),
    }


def _rerank(body: RerankBody, run: InferenceRun, record: RequestRecord, found: list[bytes]) -> RerankAnswer:
    scores, texts = _scores_of(body, run, record, found), body.texts()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[RerankResult] = []
    for index in order[: body.top_n or None]:
        result: RerankResult = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return {"id": record.request_id, "model": record.served_model, "usage": _usage_of(run), "results": results}


def _classify(_: ClassifyBody, run: InferenceRun, record: RequestRecord, found: list[bytes]) -> ClassificationList:
    labels, data = run.text.labels, list[Classification]()
    for index, logits in enumerate(found):
        probs = activated(numbers_of(logits), run.text.score_activation)
        best = max(range(len(probs)), key=probs.__getitem__)
        data.append({"index": index, "label": labels[best], "probs": probs, "num_classes": len(probs)})
    return {
        "id": record.request_id,
        "object": "list",
        "created": int(time.time()),
        "model": record.served_model,
        "data": data,
        "usage": _usage_of(run),
    }


async def _answer(
    build: Build[Body], body: Body, run: InferenceRun, record: RequestRecord, reply: HttpResponse
) -> SendLast:
    found = await collect(run)
    answer = await asyncio.to_thread(lambda: msgspec.json.encode(build(body, run, record, found)))
    return partial(_send, answer, record, reply)


async def _send(answer: bytes, record: RequestRecord, reply: HttpResponse) -> None:
    record.answered_status = 200
    await reply.pieces(iter([answer]))


SCORE = Endpoint(
    "/v1/score",
    "score",
    "score-",
    ScoreBody,
    partial(_answer, _score),
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
        partial(_answer, _rerank),
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
    partial(_answer, _classify),
    EndpointDocs(
        tag="embeddings",
        summary="Classify texts",
        detail="The label and the probabilities of a classification model for each input.",
        answer=ClassificationList,
    ),
)
