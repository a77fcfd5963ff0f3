"""Services of endpoints that describe models and count tokens, without an engine's answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from litestar import Request

from moiety_platform.adapters.cache import AdapterCache
from moiety_platform.adapters.naming import allowed_of
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.client import authenticate
from moiety_platform.auth.principal import Principal
from moiety_platform.inference.body_fields import StrictBody
from moiety_platform.inference.document_preparation import DocumentPreparation
from moiety_platform.inference.image_preparation import ImagePreparation
from moiety_platform.inference.model_text_cache import ModelTexts
from moiety_platform.inference.request_body import BodyReader
from moiety_platform.inference.token_count_limits import TokenCountLimits
from moiety_platform.request_head import api_key_authorization, fields_of
from moiety_platform.request_rules.cache import RequestRulesCache
from moiety_platform.routing.replicas import Replicas
from moiety_wire.messages import ModelCard

Body = TypeVar("Body", bound=StrictBody)


@dataclass(frozen=True, slots=True)
class ModelServices:
    """Services that these endpoints need."""

    authenticator: Authenticator
    replicas: Replicas
    texts: ModelTexts
    bodies: BodyReader
    images: ImagePreparation
    documents: DocumentPreparation
    rules: RequestRulesCache
    token_counts: TokenCountLimits
    adapters: AdapterCache | None = None

    async def caller(self, request: Request[Any, Any, Any]) -> Principal:
        """Return the caller, who may use models. Raises Unauthenticated, Forbidden or Unavailable."""
        return await authenticate(self.authenticator, request, api_key_authorization)

    async def visible(self, principal: Principal) -> dict[str, ModelCard]:
        """Return the served models that the key may use, those with adapters of its tenant, and routes to them.

        A route has the card of the first of its models that the key may use.
        """
        cards, allowed = self.replicas.cards(), principal.allowed_models
        found = {name: card for name, card in sorted(cards.items()) if allowed is None or name in allowed}
        if self.adapters is not None:
            for name, adapter in (await self.adapters.all_of(principal.tenant_id)).items():
                may_use = allowed_of(allowed, adapter)
                if adapter.model in cards and (may_use is None or adapter.model in may_use):
                    found[name] = cards[adapter.model]
        routes = (await self.rules.current()).routes
        reached = {
            name: next((found[model] for model in route.models() if model in found), None)
            for name, route in routes.items()
        }
        return found | {name: card for name, card in reached.items() if card is not None}

    async def receive(self, schema: type[Body], principal: Principal, request: Request[Any, Any, Any]) -> Body:
        """Return the request's body. Raises BadRequest or ContentTooLarge."""
        return await self.bodies.read(schema, request.receive, fields_of(request.scope), principal.tenant_id)
