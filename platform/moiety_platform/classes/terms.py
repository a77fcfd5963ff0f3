"""A class with the platform's terms, and the choice among classes. Pure: no store, no HTTP.

The engine protocol sends only what the scheduler needs; here a class also has a price and a fallback.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from moiety_platform.errors import BadRequest
from moiety_wire.classes import BATCH, FLEX, PRIORITY, SHIPPED, STANDARD, OverloadAction, ServiceClass

SHIPPED_NAMES = frozenset(service.name for service in SHIPPED)

SPOT_TIER = "spot"  # a tier of ours: the spot class of the best rank
BATCH_TIER = "batch"  # not a tier of OpenAI: the tier of a batch's lines

_CLASS_OF_TIER = {"priority": PRIORITY.name, "default": STANDARD.name, "flex": FLEX.name, BATCH_TIER: BATCH.name}
_TIER_OF_CLASS = {PRIORITY.name: "priority", STANDARD.name: "default", FLEX.name: "flex", BATCH.name: "flex"}


@dataclass(frozen=True, slots=True)
class ClassTerms:
    """One class. `downgrade_to` is the class that serves its requests on overload, if its action is to downgrade.

    `credit_percent` is the part of a request's cost that is refunded if the guarantee of its quote is missed. `spot`
    has the floor and the ceiling of a spot class's price, in percent of the class's price; None for other classes.
    """

    service: ServiceClass
    price_factor: float = 1.0
    downgrade_to: str | None = None
    credit_percent: int = 0
    spot: tuple[int, int] | None = None


class ChosenClass(msgspec.Struct, frozen=True):
    """The class of a request, and the class to fall back to."""

    service: ServiceClass
    fallback: ServiceClass | None

    def served(self, name: str) -> ServiceClass:
        """Return the class of the two that an engine reports as served; the chosen one for any other name."""
        return self.fallback if self.fallback is not None and self.fallback.name == name else self.service


class Catalogue(Mapping[str, ClassTerms]):
    """All classes of the deployment at one moment, by name."""

    def __init__(self, terms: Mapping[str, ClassTerms]) -> None:
        self._terms = dict(terms)
        self.names = self._terms.keys()

    def __getitem__(self, name: str) -> ClassTerms:
        return self._terms[name]

    def __contains__(self, name: object) -> bool:
        return name in self._terms

    def __iter__(self) -> Iterator[str]:
        return iter(self._terms)

    def __len__(self) -> int:
        return len(self._terms)

    def choose(self, cap: str, tier: str | None) -> ChosenClass:
        """Return the class of a request: the lower of the tier's class and the tenant's own.

        `cap` is the tenant's own, best class; `tier` is the request's OpenAI service tier, None if it has none. Raises
        KeyError for a cap that is not in the catalogue, BadRequest for the tier `spot` if there is no spot class.
        """
        own = self._terms[cap]
        if tier == SPOT_TIER:
            return ChosenClass(self.spot_class().service, None)
        wanted = self._terms.get(_CLASS_OF_TIER.get(tier or "auto", cap), own)
        chosen = wanted if wanted.service.rank > own.service.rank else own
        return ChosenClass(chosen.service, self._fallback(chosen))

    @property
    def spot_classes(self) -> list[ClassTerms]:
        """Spot classes, the best rank first."""
        return [terms for terms in self._terms.values() if terms.spot is not None]

    def spot_class(self) -> ClassTerms:
        """Return the spot class of the best rank. Raises BadRequest if there is none."""
        found = self.spot_classes
        if not found:
            raise BadRequest(
                "This deployment has no spot class; choose another 'service_tier', or ask its operator to create one "
                "with `moiety class create … --spot-floor-percent … --spot-ceiling-percent …`.",
                code="no_spot_class",
                param="service_tier",
            )
        return found[0]

    def named(self, name: str) -> ChosenClass:
        """Return the class of that name and its fallback. Raises KeyError."""
        terms = self._terms[name]
        return ChosenClass(terms.service, self._fallback(terms))

    def tier_of(self, service: ServiceClass) -> str:
        """Return the tier that a response states for a class: by name for shipped classes, by rank for others."""
        by_name = _TIER_OF_CLASS.get(service.name)
        if by_name is not None:
            return by_name
        if service.spot:
            return SPOT_TIER
        if service.rank <= self._rank(PRIORITY):
            return "priority"
        return "flex" if service.rank >= self._rank(FLEX) else "default"

    def _fallback(self, terms: ClassTerms) -> ServiceClass | None:
        if terms.service.on_overload is not OverloadAction.DOWNGRADE or terms.downgrade_to is None:
            return None
        return self._terms[terms.downgrade_to].service

    def _rank(self, shipped: ServiceClass) -> int:
        """Return a shipped class's current rank."""
        found = self._terms.get(shipped.name)
        return shipped.rank if found is None else found.service.rank
