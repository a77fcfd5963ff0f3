"""Response bodies of the admin API for the catalogue of models."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from moiety_platform.model_catalog.features import ModelFeature
from moiety_platform.prices.token_cost import Price, dollars


class ModelStatus(StrEnum):
    """State of a model: an engine takes requests, all its engines sleep, or none takes requests."""

    READY = "ready"
    ASLEEP = "asleep"
    UNAVAILABLE = "unavailable"


class TokenPrices(msgspec.Struct, frozen=True):
    """Prices of a million tokens, in dollars."""

    input: str
    cached_input: str
    output: str

    @classmethod
    def of(cls, price: Price) -> TokenPrices:
        return cls(dollars(price.input), dollars(price.cached_input), dollars(price.output))


class ModelReplicaLoad(msgspec.Struct, frozen=True):
    """Load of all replicas of a model now, by their last heartbeats, and their tokens since they began."""

    num_ready: int
    num_replicas: int
    num_running: int
    num_waiting: int
    prompt_tokens_total: int
    output_tokens_total: int


class ModelUser(msgspec.Struct, frozen=True):
    """A tenant with a valid key that may use the model, and the best class of its requests."""

    tenant_id: str
    name: str
    service_class: str


class ModelEntry(msgspec.Struct, frozen=True):
    """A served model.

    `prices` are by class, and empty for a model without a price. `routes` are names that lead to it, `adapters` are
    names of the model with an adapter. `tenants` are the first by name, `num_tenants` are all. `load` is null for
    administrators of one tenant, who see only their tenant and its adapters.
    """

    model: str
    family: str
    status: ModelStatus
    max_context_tokens: int
    max_output_tokens: int | None
    embedding_width: int
    features: list[ModelFeature]
    prices: dict[str, TokenPrices]
    load: ModelReplicaLoad | None
    routes: list[str]
    adapters: list[str]
    tenants: list[ModelUser]
    num_tenants: int


class ModelEntries(msgspec.Struct, frozen=True):
    """All models that an engine has reported, by name."""

    data: list[ModelEntry]
