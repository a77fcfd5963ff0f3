"""Request and response bodies of the admin API for service classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from moiety_platform.classes.checks import (
    ACTION,
    ALLOWANCE,
    CLASS_NAME,
    CREDIT,
    FACTOR,
    RANK,
    SECONDS,
    SLO_RULES,
    SPOT_SHARE,
    WEIGHT,
)
from moiety_platform.classes.terms import SHIPPED_NAMES, ClassTerms
from moiety_platform.etags import Tagged
from moiety_wire.classes import ServiceClass
from moiety_wire.shared_fields import copy_fields


class NewClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class to create. Times are seconds; null sets no bound of that kind."""

    rules: ClassVar[Sequence[Mapping[str, Any]]] = SLO_RULES

    name: Annotated[str, CLASS_NAME]
    rank: Annotated[int, RANK]
    weight: Annotated[float, WEIGHT] = 1.0
    ttft_s: Annotated[float, SECONDS] | None = None
    ttft_per_1k_s: Annotated[float, ALLOWANCE] = 0.0
    tpot_s: Annotated[float, SECONDS] | None = None
    completion_s: Annotated[float, SECONDS] | None = None
    max_queue_s: Annotated[float, SECONDS] = 600.0
    preemptible: bool = True
    on_overload: Annotated[str, ACTION] = "reject"
    price_factor: Annotated[float, FACTOR] = 1.0
    credit_percent: Annotated[int, CREDIT] = 0
    downgrade_to: Annotated[str, CLASS_NAME] | None = None
    spot_floor_percent: Annotated[int, SPOT_SHARE] | None = None
    spot_ceiling_percent: Annotated[int, SPOT_SHARE] | None = None

    @classmethod
    def of(cls, service: ServiceClass, price_factor: float = 1.0) -> NewClass:
        return cls(**_shown(service), price_factor=price_factor)


class ClassChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes of a class; fields that are not given stay unchanged."""

    rank: Annotated[int, RANK] | msgspec.UnsetType = msgspec.UNSET
    weight: Annotated[float, WEIGHT] | msgspec.UnsetType = msgspec.UNSET
    ttft_s: Annotated[float, SECONDS] | msgspec.UnsetType | None = msgspec.UNSET
    ttft_per_1k_s: Annotated[float, ALLOWANCE] | msgspec.UnsetType = msgspec.UNSET
    tpot_s: Annotated[float, SECONDS] | msgspec.UnsetType | None = msgspec.UNSET
    completion_s: Annotated[float, SECONDS] | msgspec.UnsetType | None = msgspec.UNSET
    max_queue_s: Annotated[float, SECONDS] | msgspec.UnsetType = msgspec.UNSET
    preemptible: bool | msgspec.UnsetType = msgspec.UNSET
    on_overload: Annotated[str, ACTION] | msgspec.UnsetType = msgspec.UNSET
    price_factor: Annotated[float, FACTOR] | msgspec.UnsetType = msgspec.UNSET
    credit_percent: Annotated[int, CREDIT] | msgspec.UnsetType = msgspec.UNSET
    downgrade_to: Annotated[str, CLASS_NAME] | msgspec.UnsetType | None = msgspec.UNSET
    spot_floor_percent: Annotated[int, SPOT_SHARE] | msgspec.UnsetType | None = msgspec.UNSET
    spot_ceiling_percent: Annotated[int, SPOT_SHARE] | msgspec.UnsetType | None = msgspec.UNSET


class ClassView(Tagged, frozen=True):
    """A class as the API shows it. `shipped` classes can be edited but not deleted."""

    name: str
    rank: int
    weight: float
    ttft_s: float | None
    ttft_per_1k_s: float
    tpot_s: float | None
    completion_s: float | None
    max_queue_s: float
    preemptible: bool
    on_overload: str
    price_factor: float
    credit_percent: int
    downgrade_to: str | None
    spot_floor_percent: int | None  # of a spot class, whose price follows idle capacity; null for other classes
    spot_ceiling_percent: int | None
    shipped: bool

    @classmethod
    def of(cls, terms: ClassTerms) -> ClassView:
        floor, ceiling = terms.spot or (None, None)
        return copy_fields(
            terms,
            cls,
            **_shown(terms.service),
            spot_floor_percent=floor,
            spot_ceiling_percent=ceiling,
            shipped=terms.service.name in SHIPPED_NAMES,
        )


def _shown(service: ServiceClass) -> dict[str, Any]:
    """Return the fields of the class but `spot`, which the bounds of its price show."""
    return {name: value for name, value in msgspec.structs.asdict(service).items() if name != "spot"}


class ClassList(msgspec.Struct, frozen=True):
    """All classes, best first."""

    data: list[ClassView]
