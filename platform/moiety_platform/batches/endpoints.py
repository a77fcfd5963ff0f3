"""What a batch's lines may ask for: an endpoint's body and how it is answered. Another endpoint is another entry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from moiety_platform.classes.terms import BATCH_TIER
from moiety_platform.completions.answer_types import ChatCompletion, TextCompletion
from moiety_platform.completions.controller import CHAT, COMPLETIONS
from moiety_platform.completions.exchange import Endpoint
from moiety_platform.completions.fields import AskingBody
from moiety_platform.completions.pipeline import Pipeline
from moiety_platform.completions.record import RequestRecord
from moiety_platform.completions.schemas import GenerationBody
from moiety_platform.completions.whole import collect, whole_answer

Answer = ChatCompletion | TextCompletion
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
    async with pipeline.run(record, replace(asked.generation(), service_tier=BATCH_TIER)) as run:
        return await whole_answer(asked, run, record, await collect(run))


def _generation(endpoint: Endpoint[Any]) -> BatchEndpoint:
    return BatchEndpoint(endpoint.path, endpoint.operation, endpoint.id_prefix, endpoint.schema, answer_generation)


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        _generation(CHAT),
        _generation(COMPLETIONS),
    )
}
