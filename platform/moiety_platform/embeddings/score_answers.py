"""Answers of `/v1/score`, `/v1/rerank` and `/v1/classify` from the results of all inputs. Independent of HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Self

import msgspec

from moiety_platform.embeddings.score_answer_types import (
    Classification,
    PoolingUsage,
    RerankAnswer,
    RerankResult,
    ScoreList,
)
from moiety_platform.embeddings.score_schemas import ClassifyBody, PoolingBody, RerankBody, ScoreBody
from moiety_platform.embeddings.scores import activated, cosines, numbers_of
from moiety_platform.inference.generation import Prompt, TextPair
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import InferenceRun

CLASSES_A_PIECE = 16


class PoolingResults(msgspec.Struct, frozen=True):
    """Engine results for the prompts of a request, and the request's fields in the answer."""

    answer_id: str
    model: str
    prompts: Sequence[Prompt]
    vectors: Sequence[bytes]  # vectors or logits, one for each prompt
    labels: Sequence[str]
    activation: str
    num_tokens: int

    @classmethod
    def of_run(cls, run: InferenceRun, record: RequestRecord, vectors: Sequence[bytes]) -> Self:
        """Return the results of a request."""
        assert record.generation is not None, "known before the request is submitted"
        prompts, num_tokens = record.generation.prompts, run.usage().prompt_tokens
        parts = (run.text.labels, run.text.score_activation, num_tokens)
        return cls(record.request_id, record.served_model, prompts, vectors, *parts)

    @property
    def usage(self) -> PoolingUsage:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


def pooling_pieces(body: PoolingBody, results: PoolingResults) -> Iterator[bytes]:
    """Yield the answer to the body."""
    match body:
        case ScoreBody():
            yield msgspec.json.encode(_score(body, results))
        case RerankBody():
            yield msgspec.json.encode(_rerank(body, results))
        case ClassifyBody():
            yield from _classify(results)
        case _:
            raise AssertionError("there are no other bodies")


def _scores_of(body: ScoreBody | RerankBody, results: PoolingResults) -> list[float]:
    if isinstance(results.prompts[0], TextPair):
        return [activated(numbers_of(logit), results.activation)[0] for logit in results.vectors]
    texts = [prompt for prompt in results.prompts if isinstance(prompt, str)]
    return list(cosines(body.pairs(), dict(zip(texts, results.vectors, strict=True))))


def _score(body: ScoreBody, results: PoolingResults) -> ScoreList:
    return {
        "id": results.answer_id,
        "object": "list",
        "created": int(time.time()),
        "model": results.model,
        "data": [
            {"object": "score", "index": index, "score": score} for index, score in enumerate(_scores_of(body, results))
        ],
        "usage": results.usage,
    }


def _rerank(body: RerankBody, results: PoolingResults) -> RerankAnswer:
    scores, texts = _scores_of(body, results), body.texts()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    ranked: list[RerankResult] = []
    for index in order[: body.top_n or None]:
        result: RerankResult = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        ranked.append(result)
    return {"id": results.answer_id, "model": results.model, "usage": results.usage, "results": ranked}


def _classify(results: PoolingResults) -> Iterator[bytes]:
    """Yield a `ClassificationList`, CLASSES_A_PIECE inputs at a time."""
    head = {"id": results.answer_id, "object": "list", "created": int(time.time()), "model": results.model}
    yield msgspec.json.encode(head)[:-1] + b',"data":['
    for first in range(0, len(results.vectors), CLASSES_A_PIECE):
        some = results.vectors[first : first + CLASSES_A_PIECE]
        entries = [msgspec.json.encode(_class_of(index, logits, results)) for index, logits in enumerate(some, first)]
        yield (b"," if first else b"") + b",".join(entries)
    yield b"]," + msgspec.json.encode({"usage": results.usage})[1:]


def _class_of(index: int, logits: bytes, results: PoolingResults) -> Classification:
    probs = activated(numbers_of(logits), results.activation)
    best = max(range(len(probs)), key=probs.__getitem__)
    return {"index": index, "label": results.labels[best], "probs": probs, "num_classes": len(probs)}
