"""A request with what it was matched to: model card, engines and service class."""

from __future__ import annotations

import msgspec

from moiety_platform.adapters.cache import NamedAdapter
from moiety_platform.classes.terms import Catalogue, ChosenClass
from moiety_platform.engine_client.base import EngineState
from moiety_platform.inference.generation import Generation
from moiety_platform.inference.quota_reservation import Tariff
from moiety_wire.messages import ModelCard


class MatchedRequest(msgspec.Struct, frozen=True):
    """Generation, model card, engines and service class of a request.

    The generation is of single texts where the model does not score pairs.
    """

    generation: Generation
    card: ModelCard
    states: list[EngineState]  # of all engines, at the time of the choice
    catalogue: Catalogue
    chosen: ChosenClass
    tariff: Tariff  # of the classes that may serve the request
    adapter: NamedAdapter | None
    adapter_name: str  # the engines' name of it, or an empty text
    has_images: bool
