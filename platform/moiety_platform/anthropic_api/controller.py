"""Anthropic's endpoints: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from litestar import Controller, Request, post
from litestar.di import NamedDependency
from litestar.handlers import HTTPRouteHandler
from litestar.params import SkipValidation

from moiety_platform.adapters.cache import AdapterCache
from moiety_platform.adapters.naming import allowed_of
from moiety_platform.anthropic_api.answer_types import EVENTS, CountedContext, Message, TokenCount
from moiety_platform.anthropic_api.answers import PING, MessageEvents, MessageHead, whole_message
from moiety_platform.anthropic_api.context_management import result_of
from moiety_platform.anthropic_api.errors import (
    ANTHROPIC_ERRORS,
    AnthropicErrorBody,
    answer_anthropic_error,
    answer_unexpected_anthropic,
)
from moiety_platform.anthropic_api.rate_limit_headers import NAMES as RATE_LIMITS
from moiety_platform.anthropic_api.rate_limit_headers import with_anthropic_headers
from moiety_platform.anthropic_api.schemas import ConversationBody, MessagesBody
from moiety_platform.anthropic_api.tool_answers import ToolMessageEvents, blocks_of
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.principal import INFERENCE_SCOPE, Principal, require_scope
from moiety_platform.errors import PlatformError
from moiety_platform.inference.answer_collection import AnswerChoice, parts_of, without_output
from moiety_platform.inference.context_editing import edit_conversation
from moiety_platform.inference.document_preparation import DocumentPreparation
from moiety_platform.inference.endpoint import Endpoint, EndpointDocs, Serve, route
from moiety_platform.inference.image_preparation import ImagePreparation
from moiety_platform.inference.model_routing import counted_model
from moiety_platform.inference.model_text_cache import ModelTexts
from moiety_platform.inference.request_body import BodyReader
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import InferenceRun
from moiety_platform.inference.text_answer import StreamEncoder, TextAnswer, WithheldOutput
from moiety_platform.inference.token_count_limits import TokenCountLimits
from moiety_platform.known_parameters import IGNORED, SENT_BY_BETA_CLIENTS
from moiety_platform.openapi.described import JSON, Described, describes, event_of
from moiety_platform.openapi.documents import ANTHROPIC_KEY, KEY
from moiety_platform.openapi.headers import MESSAGES_REQUEST_ID
from moiety_platform.request_head import MESSAGES_PATH, api_key_authorization, fields_of
from moiety_platform.request_rules.cache import RequestRulesCache
from moiety_platform.routing.replicas import Replicas

SECURITY = (ANTHROPIC_KEY, KEY)
COUNT_SECURITY = tuple({name: list[str]()} for name in SECURITY)

_COUNTING = describes(
    Described(
        error=AnthropicErrorBody,
        body={JSON: ConversationBody},
        errors=(404, 429),
        answer_headers=(MESSAGES_REQUEST_ID,),
    )
)


@dataclass(frozen=True, slots=True)
class MessageServices:
    """Services of the count of tokens."""

    authenticator: Authenticator
    bodies: BodyReader
    replicas: Replicas
    texts: ModelTexts
    images: ImagePreparation
    documents: DocumentPreparation
    rules: RequestRulesCache
    token_counts: TokenCountLimits
    adapters: AdapterCache | None = None


async def _prepare(body: MessagesBody, record: RequestRecord) -> MessagesBody:
    """Record that one token is generated for a request for no output, which computes and caches its prompt."""
    if body.max_tokens == 0:
        record.adjusted_fields["max_tokens"] = "1"
    return body


async def message_of(
    body: MessagesBody, run: InferenceRun, record: RequestRecord, choices: Sequence[AnswerChoice]
) -> bytes:
    """Return the message as JSON."""
    if body.max_tokens == 0:
        choices = without_output(choices)
    (choice,) = choices
    (parts,) = await parts_of(run, choices)
    head = _head(body, record)
    return whole_message(head, blocks_of(parts, omits_thinking=head.omits_thinking), choice.end, run.usage())


async def _events(body: MessagesBody, run: InferenceRun, record: RequestRecord) -> StreamEncoder:
    head, num_prompt_tokens, readers = _head(body, record), run.usage().prompt_tokens, run.new_readers()
    if readers is None or body.max_tokens == 0:
        events = MessageEvents(head, num_prompt_tokens)
        return WithheldOutput(events) if body.max_tokens == 0 else events
    return ToolMessageEvents(head, num_prompt_tokens, readers[0])


def _head(body: MessagesBody, record: RequestRecord) -> MessageHead:
    return MessageHead(
        record.request_id,
        record.served_model,
        record.served_tier,
        body.stop_sequences or (),
        is_clamped=int(record.adjusted_fields.get("max_tokens", body.max_tokens)) < body.max_tokens,
        marks_end=body.marks_end,
        omits_thinking=body.thinking is not None and body.thinking.display == "omitted",
        context_management=None if body.context_management is None else result_of(record.applied_edits),
    )


MESSAGES = Endpoint(
    MESSAGES_PATH,
    "chat",
    "msg_",
    MessagesBody,
    TextAnswer(message_of, _events),
    EndpointDocs(
        tag="text",
        summary="Answer a conversation",
        detail="Anthropic's Messages API. With `stream` the answer is sent as server-sent events.",
        answer=Message,
        event={"anyOf": [event_of(kind, name=name) for name, kind in EVENTS.items()]},
        security=SECURITY,
        headers=(MESSAGES_REQUEST_ID, *RATE_LIMITS),
    ),
    errors=ANTHROPIC_ERRORS,
    authorization=api_key_authorization,
    headers=with_anthropic_headers,
    prepare=_prepare,
    keep_alive=PING,
    ignored_parameters=SENT_BY_BETA_CLIENTS,
)


def message_route(serve: Serve) -> HTTPRouteHandler:
    """Return the handler of the endpoint that answers."""
    return route(MESSAGES, serve)


class TokenCountController(Controller):
    """Route that counts the tokens of a conversation."""

    path = f"{MESSAGES_PATH}/count_tokens"
    tags = ("text",)
    security = COUNT_SECURITY
    exception_handlers = {  # noqa: RUF012  read by the framework only
        PlatformError: answer_anthropic_error,
        Exception: answer_unexpected_anthropic,
    }

    @post(status_code=200, opt=_COUNTING | {IGNORED: SENT_BY_BETA_CLIENTS})
    async def count_message_tokens(
        self, messages: NamedDependency[SkipValidation[MessageServices]], request: Request[Any, Any, Any]
    ) -> TokenCount:
        """Count a conversation's tokens."""
        fields = fields_of(request.scope)
        principal = await messages.authenticator.authenticate(api_key_authorization(fields))
        require_scope(principal, INFERENCE_SCOPE)
        body = await messages.bodies.read(ConversationBody, request.receive, fields, principal.tenant_id)
        async with messages.token_counts.counted(principal):
            return await _count(messages, principal, body)


async def _count(messages: MessageServices, principal: Principal, body: ConversationBody) -> TokenCount:
    adapter, model = None, await counted_model(messages.rules, messages.replicas, principal, body.model)
    if messages.adapters is not None:
        adapter = await messages.adapters.find(principal.tenant_id, model)
    base = model if adapter is None else adapter.model
    asked, _ = await messages.documents.prepare_conversation(body.conversation(), principal)
    allowed = allowed_of(principal.allowed_models, adapter)
    card = messages.replicas.card(base, allowed, has_images=bool(asked.images))
    text = await messages.texts.get(card)
    asked = await messages.images.prepare_count(asked, card, principal)
    if body.context_management is not None:
        edited = await edit_conversation(
            text, asked, body.context_management.context_edits(), card, (principal.tenant_id, b"")
        )
        counted: CountedContext = {"original_input_tokens": edited.num_original_tokens}
        return {"input_tokens": len(edited.token_ids), "context_management": counted}
    (token_ids,) = await text.encode([asked], scope=(principal.tenant_id, b""))
    return {"input_tokens": len(token_ids)}
