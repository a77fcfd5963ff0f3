"""A spot price as clients see it, and the tariff of a request at that price. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from moiety_platform.errors import BadRequest, Conflict
from moiety_platform.inference.quota_reservation import Tariff
from moiety_platform.prices.token_cost import Price, dollars
from moiety_platform.spot.models import SpotPriceRecord

SPOT_HEADER = "x-moiety-spot-price"
MAX_PERCENT_HEADER = "x-moiety-spot-max-percent"
MAX_PERCENT_FIELD = MAX_PERCENT_HEADER.encode()
MAX_PERCENT_DIGITS = 3


class SpotPrice(msgspec.Struct, frozen=True):
    """Price of a spot class for one model, as a percentage of the class's price, until `ends_ms` (Unix)."""

    percent: int
    idle_percent: int
    starts_ms: int
    ends_ms: int

    @classmethod
    def of(cls, record: SpotPriceRecord) -> SpotPrice:
        return cls(record.percent, record.idle_percent, record.starts_ms, record.ends_ms)

    def tariff(self, regular: Tariff, service_class: str) -> Tariff:
        """Return the tariff of the class at this price; `regular` has the class's own price, if there is one."""
        price = regular.prices.get(service_class)
        return Tariff({service_class: None if price is None else percent_of(price, self.percent)})

    def header(self, price: Price | None) -> str:
        """Return the value of the response header: a dictionary of structured fields (RFC 8941)."""
        until = moment(self.ends_ms).strftime("%Y-%m-%dT%H:%M:%SZ")
        named = "" if price is None else "".join(
            f', {name}-usd="{dollars(value)}"'
            for name, value in (("input", price.input), ("cached-input", price.cached_input), ("output", price.output))
        )  # fmt: skip
        return f'percent={self.percent}{named}, until="{until}"'

    def require_at_most(self, field: bytes) -> None:
        """Check the price against the highest one that the client accepts. Raises BadRequest or Conflict."""
        text = field.decode("latin-1").strip()
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_PERCENT_DIGITS and 1 <= int(text) <= 100):
            raise BadRequest(
                f"The header {MAX_PERCENT_HEADER} must be a whole percentage from 1 to 100, not {text[:16]!r}.",
                code="invalid_spot_limit",
                param=MAX_PERCENT_HEADER,
            )
        if self.percent > int(text):
            raise Conflict(
                f"The spot price is {self.percent} % of the class's price until {moment(self.ends_ms):%H:%M:%S} UTC, "
                f"above the {int(text)} % of {MAX_PERCENT_HEADER}; send the request later, with a higher percentage, "
                "or in another class.",
                code="spot_price_too_high",
            )


def percent_of(price: Price, percent: int) -> Price:
    """Return a percentage of the price, each field rounded up to a whole nano-dollar per million tokens."""
    return Price(*(-(-part * percent // 100) for part in (price.input, price.cached_input, price.output)))


def moment(unix_ms: int) -> datetime:
    """Return the time as aware UTC."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC)
