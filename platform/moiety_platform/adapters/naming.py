"""What a key may call by an adapter's name, and whether an engine can serve it. Pure."""

from __future__ import annotations

from moiety_platform.adapters.cache import NamedAdapter
from moiety_platform.errors import BadRequest
from moiety_wire.messages import Card

NOT_SUPPORTED = "adapters_not_supported"


def allowed_of(allowed: frozenset[str] | None, adapter: NamedAdapter | None) -> frozenset[str] | None:
    """The models that a key may use, None being all: one that may use a model with an adapter may, with that, use the
    model; one that may use the model may use it with all adapters of its tenant."""
    if allowed is None or adapter is None or adapter.served_as not in allowed:
        return allowed
    return allowed | {adapter.model}


def require_adapters(adapter: NamedAdapter | None, card: Card) -> None:
    """Raises BadRequest where the engine of that card serves none."""
    if adapter is not None and not card.takes_adapters:
        raise BadRequest(
            f"the engine of the model {card.model!r} serves no adapters; use the model without one",
            code=NOT_SUPPORTED,
            param="model",
        )
