"""What a key may call by an adapter's name, and whether an engine can serve it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from moiety_platform.adapters.cache import NamedAdapter
from moiety_platform.engine_client.base import EngineState
from moiety_platform.errors import BadRequest
from moiety_wire.messages import ModelCard

NOT_SUPPORTED = "adapters_not_supported"


def allowed_of(allowed: frozenset[str] | None, adapter: NamedAdapter | None) -> frozenset[str] | None:
    """The models that a key may use, None being all: one that may use a model with an adapter may, with that, use the
    model; one that may use the model may use it with all adapters of its tenant."""
    if allowed is None or adapter is None or adapter.served_as not in allowed:
        return allowed
    return allowed | {adapter.model}


def adapting_card(adapter: NamedAdapter | None, card: ModelCard, able: Iterable[EngineState]) -> ModelCard:
    """The card itself, or with an adapter that of the first engine that serves some. Raises BadRequest where none
    does."""
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
