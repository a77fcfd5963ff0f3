"""OpenAI's `/v1/responses/input_tokens` endpoint, which counts the tokens of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from litestar import Controller, Request, post
from litestar.di import NamedDependency
from litestar.params import SkipValidation

from moiety_platform.adapters.naming import allowed_of
from moiety_platform.inference.field_support import ignored, mapped
from moiety_platform.inference.generation import Conversation
from moiety_platform.inference.model_routing import counted_model
from moiety_platform.inference.model_services import ModelServices
from moiety_platform.known_parameters import IGNORED, SENT_BY_BETA_CLIENTS
from moiety_platform.openapi.described import JSON, Described, describes
from moiety_platform.openapi.documents import ANTHROPIC_KEY, KEY
from moiety_platform.request_head import fields_of
from moiety_platform.responses_api.answer_types import InputTokens
from moiety_platform.responses_api.compaction import request_for_summary
from moiety_platform.responses_api.conversation_reader import ConversationReader
from moiety_platform.responses_api.item_bodies import ToolItemsBody
from moiety_platform.responses_api.schemas import ReasoningOption, TextOptions
from moiety_platform.responses_api.tool_choice import AUTO


class InputTokensBody(ToolItemsBody):
    """`POST /v1/responses/input_tokens`."""

    reasoning: ReasoningOption | None = None
    text: Annotated[TextOptions | None, ignored("A response format is not part of the prompt.")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, mapped("The whole conversation is counted, even if it does not fit.")
    ] = None
    personality: Annotated[
        str | None, ignored("Models have no such option. Put the request into the instructions.")
    ] = None

    def counted(self) -> Conversation:
        """Return the conversation to count. Raises BadRequest if calls and results do not match."""
        if self.wants_compaction:
            return request_for_summary(self.messages())
        offer = (self.tool_choice or AUTO).offer(self.offered, parallel=self.parallel_tool_calls is not False)
        effort = None if self.reasoning is None else self.reasoning.effort
        return Conversation(self.messages(), tools=offer, effort=effort)


_COUNTING = {
    **describes(Described(body={JSON: InputTokensBody}, errors=(404, 429))),
    IGNORED: SENT_BY_BETA_CLIENTS,
}


class ResponseTokensController(Controller):
    """Route that counts the tokens of a conversation."""

    path = "/v1/responses/input_tokens"
    tags = ("responses",)
    security = [{KEY: list[str]()}, {ANTHROPIC_KEY: list[str]()}]  # noqa: RUF012  read by the framework only

    @post(status_code=200, opt=_COUNTING)
    async def count_input_tokens(
        self,
        models: NamedDependency[SkipValidation[ModelServices]],
        reader: NamedDependency[SkipValidation[ConversationReader]],
        request: Request[Any, Any, Any],
    ) -> InputTokens:
        """Count a conversation's tokens, as a response would be billed for them."""
        whose = await models.caller(request)
        fields = fields_of(request.scope)
        given = await models.bodies.read(InputTokensBody, request.receive, fields, whose.tenant_id)
        async with models.token_counts.counted(whose):
            body, _ = await reader.resolve(given, whose)
            model = await counted_model(models.rules, models.replicas, whose, body.model)
            adapter = None if models.adapters is None else await models.adapters.find(whose.tenant_id, model)
            base = model if adapter is None else adapter.model
            asked, _ = await models.documents.prepare_conversation(body.counted(), whose)
            allowed = allowed_of(whose.allowed_models, adapter)
            card = models.replicas.card(base, allowed, has_images=bool(asked.images))
            text = await models.texts.get(card)
            asked = await models.images.prepare_count(asked, card, whose)
            (token_ids,) = await text.encode([asked], scope=(whose.tenant_id, b""))
            return {"object": "response.input_tokens", "input_tokens": len(token_ids)}
