"""What a batch's lines may ask for: an endpoint's body and how it is answered. Another endpoint is another entry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from moiety_platform.classes.terms import BATCH_TIER
from moiety_platform.embeddings import whole as vectors
from moiety_platform.embeddings.controller import EMBEDDINGS
from moiety_platform.embeddings.schemas import EmbeddingBody
from moiety_platform.inference.answer_collection import collect
from moiety_platform.inference.body_fields import AskingBody
from moiety_platform.inference.handler import Endpoint
from moiety_platform.inference.pipeline import Pipeline
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.openai_api.answer_types import ChatCompletion, TextCompletion
from moiety_platform.openai_api.controller import CHAT, COMPLETIONS
from moiety_platform.openai_api.schemas import GenerationBody
from moiety_platform.openai_api.whole_answers import whole_answer

MAX_VECTOR_BYTES = 32 * 1024 * 1024  # in the answer to one line, which is held and stored as a whole
BYTES_A_NUMBER = {"base64": 6, "float": 24}  # at most

Answer = ChatCompletion | TextCompletion | msgspec.Raw
AnswerBody = Callable[[Pipeline, RequestRecord, AskingBody], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class BatchEndpoint:
    """One endpoint. `answer` carries a body out through the pipeline; `id_prefix` is that of its answers."""

    path: str
    operation: str
    id_prefix: str
    schema: type[AskingBody]
    answer: AnswerBody


async def answer_generation(pipeline: Pipeline, record: RequestRecord, body: AskingBody) -> Answer:
    """A whole chat or completion, in the class of batches whatever `service_tier` it asks for."""
    asked = cast("GenerationBody", body)
    async with pipeline.run(record, msgspec.structs.replace(asked.generation(), service_tier=BATCH_TIER)) as run:
        return await whole_answer(asked, run, record, await collect(run))


async def answer_embeddings(pipeline: Pipeline, record: RequestRecord, body: AskingBody) -> Answer:
    """The vectors of all inputs, in the same class. Raises BadRequest where they are too many for one line."""
    asked = cast("EmbeddingBody", body)
    max_numbers = MAX_VECTOR_BYTES // BYTES_A_NUMBER[asked.encoding_format or "float"]
    generation = msgspec.structs.replace(asked.generation(), service_tier=BATCH_TIER, max_numbers=max_numbers)
    async with pipeline.run(record, generation) as run:
        pieces = vectors.pieces_of(asked, run, record, await vectors.collect(run))
    return msgspec.Raw(await asyncio.to_thread(b"".join, pieces))


def _generation(endpoint: Endpoint[Any]) -> BatchEndpoint:
    return BatchEndpoint(endpoint.path, endpoint.operation, endpoint.id_prefix, endpoint.schema, answer_generation)


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        _generation(CHAT),
        _generation(COMPLETIONS),
        BatchEndpoint(
            EMBEDDINGS.path, EMBEDDINGS.operation, EMBEDDINGS.id_prefix, EMBEDDINGS.schema, answer_embeddings
        ),
    )
}
