"""OpenAI's endpoints that generate text: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from litestar.handlers import HTTPRouteHandler

from moiety_platform.completions.answers import Choice
from moiety_platform.completions.exchange import Endpoint, ExchangeServices, route
from moiety_platform.completions.record import RequestRecord
from moiety_platform.completions.run import Run
from moiety_platform.completions.schemas import ChatBody, CompletionBody, GenerationBody
from moiety_platform.completions.sse import ChatChunks, CompletionChunks
from moiety_platform.completions.text_answer import TextAnswer
from moiety_platform.completions.tools.chunks import ToolChunks
from moiety_platform.completions.whole import echoes_of, head_of, whole_answer


def completion_routes(services: ExchangeServices) -> list[HTTPRouteHandler]:
    """The handlers of both endpoints."""
    return [route(CHAT, services), route(COMPLETIONS, services)]


async def _whole(body: GenerationBody, run: Run, record: RequestRecord, choices: Sequence[Choice]) -> bytes:
    return msgspec.json.encode(await whole_answer(body, run, record, choices))


async def _chat_chunks(body: ChatBody, run: Run, record: RequestRecord) -> ChatChunks:
    head, readers = head_of(run, record), run.new_readers()
    return ChatChunks(head, body.include_usage) if readers is None else ToolChunks(head, body.include_usage, readers)


async def _completion_chunks(body: CompletionBody, run: Run, record: RequestRecord) -> CompletionChunks:
    return CompletionChunks(head_of(run, record), body.include_usage, await echoes_of(body, run))


CHAT = Endpoint("/v1/chat/completions", "chat", "chatcmpl-", ChatBody, TextAnswer(_whole, _chat_chunks))
COMPLETIONS = Endpoint(
    "/v1/completions", "text_completion", "cmpl-", CompletionBody, TextAnswer(_whole, _completion_chunks)
)
