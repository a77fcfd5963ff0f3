"""`POST /v1/quote`: maps HTTP to the service of quotes."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Controller, Request, post
from litestar.di import NamedDependency
from litestar.params import QueryParameter, SkipValidation

from moiety_platform.anthropic_api.schemas import MessagesBody
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.client import authenticate
from moiety_platform.auth.principal import Principal
from moiety_platform.errors import BadRequest
from moiety_platform.inference.pipeline import RequestPipeline
from moiety_platform.inference.token_count_limits import TokenCountLimits
from moiety_platform.openai_api.schemas import ChatBody, CompletionBody
from moiety_platform.openapi.described import JSON, Described, describes
from moiety_platform.openapi.documents import ANTHROPIC_KEY, KEY
from moiety_platform.quotes_api.answer_types import QuoteList
from moiety_platform.quotes_api.quote_service import QuotedEndpoint, QuoteService, QuoteTerms
from moiety_platform.request_head import api_key_authorization, fields_of
from moiety_platform.responses_api.conversation_reader import ConversationReader
from moiety_platform.responses_api.schemas import ResponsesBody
from moiety_platform.settings import GatewaySettings

CHAT_PATH = "/v1/chat/completions"
PATHS = (CHAT_PATH, "/v1/completions", "/v1/responses", "/v1/messages")
QuotedPath = Annotated[
    str | None,
    QueryParameter(
        description=f"Endpoint that the request is for; {CHAT_PATH} if not given.", schema_extra={"enum": list(PATHS)}
    ),
]


def quote_service_of(
    pipeline: RequestPipeline, reader: ConversationReader, settings: GatewaySettings, token_counts: TokenCountLimits
) -> QuoteService:
    """Return the service of quotes of the four text APIs."""

    async def continued(body: ResponsesBody, principal: Principal) -> ResponsesBody:
        return (await reader.resolve(body, principal))[0]

    chat, completions, responses, messages = PATHS
    endpoints = (
        QuotedEndpoint(chat, ChatBody),
        QuotedEndpoint(completions, CompletionBody),
        QuotedEndpoint(responses, ResponsesBody, continued),
        QuotedEndpoint(messages, MessagesBody),
    )
    return QuoteService(pipeline, {one.path: one for one in endpoints}, quote_terms_of(settings), token_counts)


def quote_terms_of(settings: GatewaySettings) -> QuoteTerms:
    """Return the settings of quotes."""
    return QuoteTerms(settings.quote_ttl_s, settings.quote_margin)


class QuoteController(Controller):
    """Route that quotes requests."""

    path = "/v1/quote"
    tags = ("text",)
    security = [{KEY: list[str]()}, {ANTHROPIC_KEY: list[str]()}]  # noqa: RUF012  read by the framework only

    @post(status_code=200, opt=describes(Described(body={JSON: ChatBody}, errors=(404, 429))))
    async def quote_request(
        self,
        authenticator: NamedDependency[SkipValidation[Authenticator]],
        quotes: NamedDependency[SkipValidation[QuoteService]],
        request: Request[Any, Any, Any],
        endpoint: QuotedPath = None,
    ) -> QuoteList:
        """Quote a request: its price, predicted times and guarantee in every class that the key may use.

        The body is that of the request. Nothing stays reserved, and nothing is charged.
        """
        quoted = quotes.endpoints.get(endpoint or CHAT_PATH)
        if quoted is None:
            raise BadRequest(f"'endpoint' must be one of {', '.join(PATHS)}", param="endpoint")
        principal = await authenticate(authenticator, request, api_key_authorization)
        return await quotes.quote(quoted, principal, request.receive, fields_of(request.scope))
