"""Endpoints that batch lines may use: the body of a line, and how it is answered. A new endpoint is one more entry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from moiety_platform.anthropic_api.controller import MESSAGES, message_of
from moiety_platform.anthropic_api.schemas import MessagesBody
from moiety_platform.classes.terms import BATCH_TIER
from moiety_platform.decisions.answers import collect_option_scores, decision_of
from moiety_platform.decisions.controller import DECISIONS
from moiety_platform.decisions.schemas import DecisionBody
from moiety_platform.embeddings import whole as vectors
from moiety_platform.embeddings.controller import EMBEDDINGS
from moiety_platform.embeddings.schemas import EmbeddingBody
from moiety_platform.embeddings.score_answers import PoolingResults, pooling_pieces
from moiety_platform.embeddings.score_controller import CLASSIFY, RERANKS, SCORE
from moiety_platform.embeddings.score_schemas import ClassifyBody, PoolingBody
from moiety_platform.inference.answer_collection import collect
from moiety_platform.inference.body_fields import InferenceBody
from moiety_platform.inference.endpoint import Endpoint
from moiety_platform.inference.pipeline import RequestPipeline
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.openai_api.answer_types import ChatCompletion, TextCompletion
from moiety_platform.openai_api.answers import whole_answer
from moiety_platform.openai_api.controller import CHAT, COMPLETIONS
from moiety_platform.openai_api.schemas import GenerationBody
from moiety_platform.responses_api.answers import ID_PREFIX as RESPONSE_PREFIX
from moiety_platform.responses_api.controller import PATH as RESPONSES_PATH
from moiety_platform.responses_api.whole import BatchResponsesBody, whole_response

MAX_VECTOR_BYTES = 32 * 1024 * 1024  # of one line's answer, which is held and stored as a whole
BYTES_A_NUMBER = {"base64": 6, "float": 24}  # at most
BYTES_A_HELD_NUMBER = 4  # of vectors whose cosines are answered

Answer = ChatCompletion | TextCompletion | msgspec.Raw
AnswerBody = Callable[[RequestPipeline, RequestRecord, InferenceBody], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class BatchEndpoint:
    """One endpoint. `answer` runs a body through the pipeline; `id_prefix` is the prefix of its answers' ids."""

    path: str
    operation: str
    id_prefix: str
    schema: type[InferenceBody]
    answer: AnswerBody


async def answer_generation(pipeline: RequestPipeline, record: RequestRecord, body: InferenceBody) -> Answer:
    """Answer a whole chat or text completion, in the batch class whatever its `service_tier`."""
    asked = cast("GenerationBody", body)
    async with await pipeline.start(
        record, msgspec.structs.replace(asked.generation(), service_tier=BATCH_TIER)
    ) as run:
        return await whole_answer(asked, run, record, await collect(run))


async def answer_embeddings(pipeline: RequestPipeline, record: RequestRecord, body: InferenceBody) -> Answer:
    """Return the embeddings of all inputs, in the batch class. Raises BadRequest if they are too large for one line."""
    asked = cast("EmbeddingBody", body)
    max_numbers = MAX_VECTOR_BYTES // BYTES_A_NUMBER[asked.encoding_format or "float"]
    generation = msgspec.structs.replace(asked.generation(), service_tier=BATCH_TIER, max_numbers=max_numbers)
    async with await pipeline.start(record, generation) as run:
        pieces = vectors.pieces_of(asked, run, record, await vectors.collect(run))
    return msgspec.Raw(await asyncio.to_thread(b"".join, pieces))


async def answer_pooling(pipeline: RequestPipeline, record: RequestRecord, body: InferenceBody) -> Answer:
    """Return scores, ranks or classes, in the batch class. Raises BadRequest if they are too large for one line."""
    asked = cast("PoolingBody", body)
    each = BYTES_A_NUMBER["float"] if isinstance(asked, ClassifyBody) else BYTES_A_HELD_NUMBER
    generation = msgspec.structs.replace(
        asked.generation(), service_tier=BATCH_TIER, max_numbers=MAX_VECTOR_BYTES // each
    )
    async with await pipeline.start(record, generation) as run:
        results = PoolingResults.of_run(run, record, await vectors.collect(run))
    return msgspec.Raw(await asyncio.to_thread(b"".join, pooling_pieces(asked, results)))


async def answer_decisions(pipeline: RequestPipeline, record: RequestRecord, body: InferenceBody) -> Answer:
    """Answer closed questions with probabilities, in the batch class."""
    asked = cast("DecisionBody", body)
    generation = msgspec.structs.replace(asked.generation(), service_tier=BATCH_TIER)
    async with await pipeline.start(record, generation) as run:
        decision = decision_of(asked, run, record, await collect_option_scores(run))
    return msgspec.Raw(msgspec.json.encode(decision))


async def answer_message(pipeline: RequestPipeline, record: RequestRecord, body: InferenceBody) -> Answer:
    """Answer a conversation in Anthropic's fields, in the batch class."""
    asked = cast("MessagesBody", body)
    generation = msgspec.structs.replace(asked.generation(), service_tier=BATCH_TIER)
    async with await pipeline.start(record, generation) as run:
        return msgspec.Raw(await message_of(asked, run, record, await collect(run)))


async def answer_response(pipeline: RequestPipeline, record: RequestRecord, body: InferenceBody) -> Answer:
    """Answer items in OpenAI's fields for responses, in the batch class. Nothing is stored beside the line's answer."""
    asked = cast("BatchResponsesBody", body)
    generation = msgspec.structs.replace(asked.generation(), service_tier=BATCH_TIER)
    async with await pipeline.start(record, generation) as run:
        return msgspec.Raw(await whole_response(asked, run, record))


def _batched(endpoint: Endpoint[Any], answer: AnswerBody) -> BatchEndpoint:
    return BatchEndpoint(endpoint.path, endpoint.operation, endpoint.id_prefix, endpoint.schema, answer)


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        _batched(CHAT, answer_generation),
        _batched(COMPLETIONS, answer_generation),
        _batched(MESSAGES, answer_message),
        _batched(EMBEDDINGS, answer_embeddings),
        _batched(SCORE, answer_pooling),
        *(_batched(rerank, answer_pooling) for rerank in RERANKS),
        _batched(CLASSIFY, answer_pooling),
        _batched(DECISIONS, answer_decisions),
        BatchEndpoint(RESPONSES_PATH, "chat", RESPONSE_PREFIX, BatchResponsesBody, answer_response),
    )
}
