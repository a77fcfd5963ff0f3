"""OpenAI's endpoints that generate text: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from litestar.handlers import HTTPRouteHandler

from moiety_platform.completions.answers import AnswerHead, Choice, chat_answer, completion_answer
from moiety_platform.completions.exchange import Endpoint, ExchangeServices, route
from moiety_platform.completions.record import RequestRecord
from moiety_platform.completions.run import Run
from moiety_platform.completions.schemas import ChatBody, CompletionBody
from moiety_platform.completions.sse import ChatChunks, CompletionChunks
from moiety_platform.completions.text_answer import TextAnswer


def completion_routes(services: ExchangeServices) -> list[HTTPRouteHandler]:
    """The handlers of both endpoints."""
    chat = TextAnswer(_whole_chat, _chat_chunks)
    completion = TextAnswer(_whole_completion, _completion_chunks)
    return [
        route(Endpoint("/v1/chat/completions", "chat", "chatcmpl-", ChatBody, chat), services),
        route(Endpoint("/v1/completions", "text_completion", "cmpl-", CompletionBody, completion), services),
    ]


async def _whole_chat(body: ChatBody, run: Run, record: RequestRecord, choices: Sequence[Choice]) -> bytes:
    answer = chat_answer(_head(run, record), choices, run.usage(), with_logprobs=bool(body.logprobs))
    return msgspec.json.encode(answer)


async def _chat_chunks(body: ChatBody, run: Run, record: RequestRecord) -> ChatChunks:
    return ChatChunks(_head(run, record), body.include_usage)


async def _whole_completion(body: CompletionBody, run: Run, record: RequestRecord, choices: Sequence[Choice]) -> bytes:
    echoes = await _echoes(body, run)
    with_logprobs = body.logprobs is not None
    answer = completion_answer(_head(run, record), choices, run.usage(), echoes=echoes, with_logprobs=with_logprobs)
    return msgspec.json.encode(answer)


async def _completion_chunks(body: CompletionBody, run: Run, record: RequestRecord) -> CompletionChunks:
    return CompletionChunks(_head(run, record), body.include_usage, await _echoes(body, run))


def _head(run: Run, record: RequestRecord) -> AnswerHead:
    return AnswerHead(
        answer_id=record.request_id,
        created=record.arrival_unix_ns // 1_000_000_000,
        model=record.served_model,
        system_fingerprint=run.text.fingerprint,
        service_tier=record.served_tier,
    )


async def _echoes(body: CompletionBody, run: Run) -> Sequence[str]:
    """The prompt's text for each choice if the request wants it, else empty strings."""
    if not body.echo:
        return [""] * len(run.streams)
    prompts = [
        prompt if isinstance(prompt, str) else await run.text.decode(token_ids)
        for prompt, token_ids in zip(body.generation().prompts, run.prompts, strict=True)
    ]
    return [prompt for prompt in prompts for _ in range(body.n or 1)]
