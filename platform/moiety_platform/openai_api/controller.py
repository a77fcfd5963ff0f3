"""OpenAI's text generation endpoints: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar.handlers import HTTPRouteHandler

from moiety_platform.http_errors import ErrorBody
from moiety_platform.inference.answer_collection import AnswerChoice
from moiety_platform.inference.endpoint import Endpoint, EndpointDocs, Serve, route
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import InferenceRun
from moiety_platform.inference.text_answer import TextAnswer
from moiety_platform.openai_api.answer_types import (
    ChatCompletion,
    ChatCompletionChunk,
    TextCompletion,
    TextCompletionChunk,
)
from moiety_platform.openai_api.answers import whole_answer
from moiety_platform.openai_api.chunks import DONE_DATA, chat_chunks, completion_chunks
from moiety_platform.openai_api.schemas import ChatBody, CompletionBody, GenerationBody
from moiety_platform.openapi.described import event_of


def completion_routes(serve: Serve) -> list[HTTPRouteHandler]:
    """Return the handlers of both endpoints."""
    return [route(CHAT, serve), route(COMPLETIONS, serve)]


async def _whole(
    body: GenerationBody, run: InferenceRun, record: RequestRecord, choices: Sequence[AnswerChoice]
) -> bytes:
    return msgspec.json.encode(await whole_answer(body, run, record, choices))


async def _prepare(body: CompletionBody, record: RequestRecord) -> CompletionBody:
    """Record that one token is generated for a request for no output, which computes and scores its prompt."""
    if body.max_tokens == 0:
        record.adjusted_fields["max_tokens"] = "1"
    return body


def _docs(summary: str, api: str, answer: Any, chunk: Any) -> EndpointDocs:
    return EndpointDocs(
        tag="text",
        summary=summary,
        detail=f"OpenAI's {api}. With `stream` the answer is sent as server-sent events; the last event is `[DONE]`.",
        answer=answer,
        event=event_of(chunk, ErrorBody, last=DONE_DATA),
    )


CHAT = Endpoint(
    "/v1/chat/completions",
    "chat",
    "chatcmpl-",
    ChatBody,
    TextAnswer(_whole, chat_chunks),
    _docs("Answer a chat", "Chat Completions", ChatCompletion, ChatCompletionChunk),
)
COMPLETIONS = Endpoint(
    "/v1/completions",
    "text_completion",
    "cmpl-",
    CompletionBody,
    TextAnswer(_whole, completion_chunks),
    _docs("Complete a text", "Completions", TextCompletion, TextCompletionChunk),
    prepare=_prepare,
)
