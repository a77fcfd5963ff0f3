"""Adapter names in a key's allowed models, and the choice of an engine that serves adapters. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from moiety_platform.adapters.cache import NamedAdapter
from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import BadRequest
from moiety_wire.messages import ModelCard

NOT_SUPPORTED = "adapters_not_supported"


def allowed_of(allowed: frozenset[str] | None, adapter: NamedAdapter | None) -> frozenset[str] | None:
    """Return the models that a key may use; None means all.

    A key that may use a model with an adapter may, with that adapter, use the model. A key that may use the model may
    use it with all adapters of its tenant.
    """
    if allowed is None or adapter is None or adapter.served_as not in allowed:
        return allowed
    return allowed | {adapter.model}


def adapting_card(adapter: NamedAdapter | None, card: ModelCard, able: Iterable[EngineState]) -> ModelCard:
    """Return `card`, or with an adapter the card of the first engine that serves adapters.

    Raises BadRequest where no engine does.
    """
    if adapter is None or card.takes_adapters:
        return card
    found = next((one.card for one in able if one.card is not None and one.card.takes_adapters), None)
    if found is None:
        raise BadRequest(
            f"the engine of the model {card.model!r} serves no adapters; use the model without one",
            code=NOT_SUPPORTED,
            param="model",
        )
    return found
