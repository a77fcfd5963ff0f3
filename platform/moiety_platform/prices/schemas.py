"""Request and response bodies of the admin API for prices.

Prices are dollars per million tokens, as text, so that they are exact.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from moiety_platform.classes.checks import CLASS_NAME
from moiety_platform.etags import Tagged
from moiety_platform.openapi.schemas import shows
from moiety_platform.prices.models import MAX_MODEL_LENGTH, PriceRecord
from moiety_platform.prices.token_cost import ANY_CLASS, DOLLARS, dollars

Dollars = Annotated[str, shows(pattern=f"^({DOLLARS.pattern})$")]


class NewPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A price to set, which replaces the price of the same model and class.

    Without `service_class` it applies to every class without a price of its own, times the class's factor; without
    `cached_input` cached tokens have the price of other input tokens.
    """

    model: Annotated[str, shows(minLength=1, maxLength=MAX_MODEL_LENGTH, format="printable")]
    input: Dollars
    output: Dollars
    cached_input: Dollars | None = None
    service_class: Annotated[str, CLASS_NAME] | None = None


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
    """All prices by model and class."""

    data: list[PriceView]
