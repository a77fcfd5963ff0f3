"""Client endpoints of the served models: `/v1/models`, `/tokenize`, `/detokenize`; and of this server: `/version`.

`/tokenize` and `/detokenize` are below `/v1` too, for clients that have only one base URL.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict, TypeVar

from litestar import Controller, Request, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter, SkipValidation
from litestar.types import ExceptionHandlersMap
from pydantic import ConfigDict, model_validator

from moiety_platform.anthropic_api.errors import answer_error_of_version
from moiety_platform.anthropic_api.models import (
    DEFAULT_PAGE,
    LIFECYCLE,
    MAX_PAGE,
    ModelInfo,
    ModelPage,
    includes_active,
    model_info,
    model_page,
    parse_limit,
)
from moiety_platform.errors import BadRequest, NotFound, PlatformError, Unavailable
from moiety_platform.inference.body_fields import ModelName, StrictBody, TokenIds, refuse, shows
from moiety_platform.inference.generation import Conversation, Prompt
from moiety_platform.inference.model_services import ModelServices
from moiety_platform.inference.tool_fields import TemplateVariables
from moiety_platform.known_parameters import IGNORED, SENT_BY_BETA_CLIENTS
from moiety_platform.openai_api.chat_messages import Messages, messages_of
from moiety_platform.openai_api.schemas import FORMS
from moiety_platform.openai_api.tools import ChatTools, offer_of
from moiety_platform.openapi.described import JSON, Described, describes
from moiety_platform.openapi.documents import ANTHROPIC_KEY, KEY
from moiety_platform.openapi.schemas import either
from moiety_platform.query_parameters import whole
from moiety_platform.request_head import VERSION_HEADER, fields_of
from moiety_platform.routing.choose import MODEL_NOT_FOUND, model_not_found
from moiety_wire.messages import ModelCard

Body = TypeVar("Body", bound=StrictBody)

SECURITY = [{name: list[str]()} for name in (KEY, ANTHROPIC_KEY)]
_BETA = {IGNORED: SENT_BY_BETA_CLIENTS}
_LISTED = {IGNORED: SENT_BY_BETA_CLIENTS | LIFECYCLE}

Limit = Annotated[
    str | None, whole(f"Largest number of results, in Anthropic's list; {DEFAULT_PAGE} if not given.", 1, MAX_PAGE)
]
BeforeId = Annotated[str | None, QueryParameter(description="The id of the model after the page (Anthropic's list).")]
AfterId = Annotated[str | None, QueryParameter(description="The id of the model before the page (Anthropic's list).")]


class _Body(StrictBody):
    forms: ClassVar[Mapping[str, str]] = FORMS

    model: ModelName | None = None  # optional where one model is served


class TokenizeBody(_Body):
    """Raw text, or messages for the model's chat template.

    A text that certainly exceeds the model's context is refused without counting; a slightly longer one is counted.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "required": ["prompt"],
                    "properties": {
                        "prompt": {"type": "string"},
                        "messages": {"type": "null"},
                        "tools": {"maxItems": 0},
                    },
                },
                {
                    "required": ["messages"],
                    "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}},
                },
            ]
        }
    )

    prompt: Annotated[str, shows(minLength=1)] | None = None
    messages: Messages | None = None
    tools: ChatTools | None = None  # only with messages, like the next field
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refuse("send either 'prompt' (a string) or 'messages'")
        if self.tools and self.messages is None:
            raise refuse("'tools' go with 'messages'; leave them out beside 'prompt'")
        return self

    def as_prompt(self) -> Prompt:
        if self.messages is not None:
            options = self.chat_template_kwargs or {}
            return Conversation(messages_of(self.messages), tools=offer_of(self.tools), template_options=options)
        assert self.prompt is not None
        return self.prompt


class DetokenizeBody(_Body):
    tokens: TokenIds


class Model(TypedDict):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """The models that the key may use."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(TypedDict):
    """The token ids of a text, their number, and the model's context length."""

    tokens: list[int]
    count: int
    max_model_len: int


class ServerVersion(TypedDict):
    """The version of this server."""

    version: str


class Detokenized(TypedDict):
    """The text of token ids."""

    prompt: str


def _takes(body: type[StrictBody]) -> dict[str, Described]:
    return describes(Described(body={JSON: body}, errors=(404, 429)))


_ERRORS: ExceptionHandlersMap = {PlatformError: answer_error_of_version}


class ModelController(Controller):
    """Routes of the served models."""

    tags = ("models",)
    security = SECURITY

    @get("/v1/models", opt=_LISTED, exception_handlers=_ERRORS)
    async def list_models(
        self,
        models: NamedDependency[SkipValidation[ModelServices]],
        request: Request[Any, Any, Any],
        limit: Limit = None,
        before_id: BeforeId = None,
        after_id: AfterId = None,
    ) -> Annotated[Any, either(ModelList, ModelPage)]:
        """List the served models that the key may use.

        A request with the header `anthropic-version` gets them in Anthropic's fields, page by page.
        """
        cards = await models.visible(await models.caller(request))
        most = parse_limit(limit)
        if not includes_active(request.scope["query_string"]):
            cards = {}
        if VERSION_HEADER in fields_of(request.scope):
            return model_page(cards, most, before_id, after_id)
        return {"object": "list", "data": [_describe(name, card) for name, card in cards.items()]}

    @get("/v1/models/{model_id:path}", opt=_BETA, exception_handlers=_ERRORS)
    async def retrieve_model(
        self,
        models: NamedDependency[SkipValidation[ModelServices]],
        request: Request[Any, Any, Any],
        model_id: FromPath[str],
    ) -> Annotated[Any, either(Model, ModelInfo)]:
        """Get one model, in Anthropic's fields if the request has the header `anthropic-version`."""
        cards = await models.visible(await models.caller(request))
        name = model_id.removeprefix("/")
        card = _find(cards, name)
        return model_info(name, card) if VERSION_HEADER in fields_of(request.scope) else _describe(name, card)

    @post("/tokenize", status_code=200, opt=_takes(TokenizeBody))
    async def tokenize(
        self, models: NamedDependency[SkipValidation[ModelServices]], request: Request[Any, Any, Any]
    ) -> Tokenized:
        """Turn a text or a conversation into token ids."""
        return await _tokenized(models, request)

    @post("/v1/tokenize", status_code=200, opt=_takes(TokenizeBody))
    async def tokenize_below_v1(
        self, models: NamedDependency[SkipValidation[ModelServices]], request: Request[Any, Any, Any]
    ) -> Tokenized:
        """Turn a text or a conversation into token ids, as `/tokenize` does."""
        return await _tokenized(models, request)

    @post("/detokenize", status_code=200, opt=_takes(DetokenizeBody))
    async def detokenize(
        self, models: NamedDependency[SkipValidation[ModelServices]], request: Request[Any, Any, Any]
    ) -> Detokenized:
        """Turn token ids into text."""
        return await _detokenized(models, request)

    @post("/v1/detokenize", status_code=200, opt=_takes(DetokenizeBody))
    async def detokenize_below_v1(
        self, models: NamedDependency[SkipValidation[ModelServices]], request: Request[Any, Any, Any]
    ) -> Detokenized:
        """Turn token ids into text, as `/detokenize` does."""
        return await _detokenized(models, request)

    @get("/version")
    async def get_version(
        self, models: NamedDependency[SkipValidation[ModelServices]], request: Request[Any, Any, Any]
    ) -> ServerVersion:
        """Return the version of this server. It needs a key, unlike vLLM's."""
        await models.caller(request)
        return {"version": version("moiety")}


async def _tokenized(models: ModelServices, request: Request[Any, Any, Any]) -> Tokenized:
    principal = await models.caller(request)
    cards = await models.visible(principal)
    body = await models.receive(TokenizeBody, principal, request)
    async with models.token_counts.counted(principal):
        card = _find(cards, body.model)
        prompt = body.as_prompt()
        if isinstance(prompt, Conversation):
            prompt, _ = await models.documents.prepare_conversation(prompt, principal)
            prompt = await models.images.prepare_count(prompt, card, principal)
        (tokens,) = await (await models.texts.get(card)).encode([prompt])
        return {"tokens": tokens, "count": len(tokens), "max_model_len": card.max_context_tokens}


async def _detokenized(models: ModelServices, request: Request[Any, Any, Any]) -> Detokenized:
    principal = await models.caller(request)
    cards = await models.visible(principal)
    body = await models.receive(DetokenizeBody, principal, request)
    async with models.token_counts.counted(principal):
        text = await models.texts.get(_find(cards, body.model))
        return {"prompt": await text.decode(body.tokens)}


def _find(cards: dict[str, ModelCard], model: str | None) -> ModelCard:
    if not cards:
        raise Unavailable("no engine is ready yet; try again shortly", code="no_engine", retry_after_s=1)
    if model is None:
        if len({card.model for card in cards.values()}) > 1:
            raise BadRequest(f"'model' is missing; it must be one of {', '.join(cards)}", param="model")
        return next(iter(cards.values()))
    if model not in cards:
        raise NotFound(model_not_found(model[:256], list(cards)), code=MODEL_NOT_FOUND, param="model")
    return cards[model]


def _describe(name: str, card: ModelCard) -> Model:
    return {
        "id": name,
        "object": "model",
        "created": card.created_unix_s,
        "owned_by": "moiety",
        "max_model_len": card.max_context_tokens,
    }
