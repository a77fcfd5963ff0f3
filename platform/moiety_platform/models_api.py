"""What a client may ask about the served models: `/v1/models`, `/tokenize`, `/detokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import msgspec
from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from pydantic import model_validator

from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.client import authenticate
from moiety_platform.auth.principal import Principal
from moiety_platform.completions.body import receive_body
from moiety_platform.completions.chat_messages import Messages
from moiety_platform.completions.fields import ModelName, StrictBody, TokenIds, refuse
from moiety_platform.completions.generation import Conversation, Prompt
from moiety_platform.completions.limits import ShapeLimits
from moiety_platform.completions.schemas import FORMS
from moiety_platform.completions.text import ModelTexts
from moiety_platform.completions.tools.schemas import ChatTools, offer_of
from moiety_platform.errors import BadRequest, NotFound, Unavailable
from moiety_platform.routing.choose import MODEL_NOT_FOUND, model_not_found
from moiety_platform.routing.replicas import Replicas
from moiety_wire.messages import Card

Body = TypeVar("Body", bound=StrictBody)


class _Body(StrictBody):
    forms: ClassVar[Mapping[str, str]] = FORMS

    model: ModelName | None = None  # may be left out where one model is served


class TokenizeBody(_Body):
    """Raw text, or messages for the model's chat template. What cannot fit the model's context is refused, not counted;
    what is longer by less is."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: ChatTools | None = None  # beside messages

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refuse("send either 'prompt' (a string) or 'messages'")
        if self.tools and self.messages is None:
            raise refuse("'tools' go with 'messages'; leave them out beside 'prompt'")
        return self

    def as_prompt(self) -> Prompt:
        if self.messages is not None:
            messages = tuple(message.for_template() for message in self.messages)
            return Conversation(messages, tools=offer_of(self.tools))
        assert self.prompt is not None
        return self.prompt


class DetokenizeBody(_Body):
    tokens: TokenIds


@dataclass(frozen=True, slots=True)
class ModelServices:
    """What these endpoints need."""

    authenticator: Authenticator
    replicas: Replicas
    texts: ModelTexts
    max_body_bytes: int
    max_json_depth: int
    shape: ShapeLimits


def model_routes(services: ModelServices) -> list[HTTPRouteHandler]:
    """The handlers of these endpoints."""

    async def caller(request: Request[Any, Any, Any]) -> Principal:
        return await authenticate(services.authenticator, request)

    async def receive(schema: type[Body], request: Request[Any, Any, Any]) -> Body:
        limits = (services.max_body_bytes, services.max_json_depth, services.shape)
        return await receive_body(schema, request.receive, request.scope["headers"], *limits)

    @get("/v1/models", name="list_models")
    async def list_models(request: Request[Any, Any, Any]) -> Response[bytes]:
        cards = _visible(services.replicas, await caller(request))
        return _json({"object": "list", "data": [_describe(card) for card in cards.values()]})

    @get("/v1/models/{model_id:path}", name="retrieve_model")
    async def retrieve_model(request: Request[Any, Any, Any]) -> Response[bytes]:
        cards = _visible(services.replicas, await caller(request))
        return _json(_describe(_find(cards, request.path_params["model_id"].removeprefix("/"))))

    @post("/tokenize", name="tokenize")
    async def tokenize(request: Request[Any, Any, Any]) -> Response[bytes]:
        cards = _visible(services.replicas, await caller(request))
        body = await receive(TokenizeBody, request)
        card = _find(cards, body.model)
        (tokens,) = await (await services.texts.get(card)).encode([body.as_prompt()])
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": card.max_context_tokens})

    @post("/detokenize", name="detokenize")
    async def detokenize(request: Request[Any, Any, Any]) -> Response[bytes]:
        cards = _visible(services.replicas, await caller(request))
        body = await receive(DetokenizeBody, request)
        text = await services.texts.get(_find(cards, body.model))
        return _json({"prompt": await text.decode(body.tokens)})

    return [list_models, retrieve_model, tokenize, detokenize]


def _visible(replicas: Replicas, principal: Principal) -> dict[str, Card]:
    """The served models that the key may use."""
    cards, allowed = replicas.cards(), principal.allowed_models
    return {name: card for name, card in sorted(cards.items()) if allowed is None or name in allowed}


def _find(cards: dict[str, Card], model: str | None) -> Card:
    if not cards:
        raise Unavailable("no engine is ready yet; try again shortly", code="no_engine", retry_after_s=1)
    if model is None:
        if len(cards) > 1:
            raise BadRequest(f"'model' is missing; it must be one of {', '.join(cards)}", param="model")
        return next(iter(cards.values()))
    if model not in cards:
        raise NotFound(model_not_found(model[:256], list(cards)), code=MODEL_NOT_FOUND, param="model")
    return cards[model]


def _describe(card: Card) -> dict[str, Any]:
    return {
        "id": card.model,
        "object": "model",
        "created": card.created_unix_s,
        "owned_by": "moiety",
        "max_model_len": card.max_context_tokens,
    }


def _json(fields: dict[str, Any]) -> Response[bytes]:
    return Response(msgspec.json.encode(fields), status_code=200, media_type="application/json")
