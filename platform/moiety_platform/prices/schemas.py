"""What the admin API says and hears of prices: dollars a million tokens, as text, so that they are exact."""

from __future__ import annotations

import msgspec

from moiety_platform.etags import Tagged
from moiety_platform.prices.models import PriceRecord
from moiety_platform.prices.terms import ANY_CLASS, dollars


class NewPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A price to be set; one of the same model and class is replaced. Without `service_class` it holds for every class
    that has none of its own, times the class's factor; without `cached_input` cached tokens cost what others cost."""

    model: str
    input: str
    output: str
    cached_input: str | None = None
    service_class: str | None = None


class PriceView(Tagged, frozen=True):
    """One price."""

    model: str
    service_class: str | None
    input: str
    cached_input: str
    output: str

    @classmethod
    def of(cls, record: PriceRecord) -> PriceView:
        return cls(
            model=record.model,
            service_class=None if record.service_class == ANY_CLASS else record.service_class,
            input=dollars(record.input),
            cached_input=dollars(record.cached_input),
            output=dollars(record.output),
        )


class PriceViews(msgspec.Struct, frozen=True):
    """All prices, by model and class."""

    data: list[PriceView]
