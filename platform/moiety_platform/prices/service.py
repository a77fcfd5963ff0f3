"""Sets, finds and deletes prices within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.classes.service import require_class
from moiety_platform.db.row_limits import get_or_add
from moiety_platform.errors import BadRequest, NotFound
from moiety_platform.prices.models import MAX_MODEL_LENGTH, PriceRecord
from moiety_platform.prices.schemas import NewPrice
from moiety_platform.prices.token_cost import ANY_CLASS, Price, PriceList, parse_dollars

MAX_PRICES = 10_000


async def load_prices(session: AsyncSession) -> PriceList:
    """Return all prices."""
    return PriceList(
        {
            (record.model, record.service_class): Price(record.input, record.cached_input, record.output)
            for record in await list_prices(session)
        }
    )


async def list_prices(session: AsyncSession) -> Sequence[PriceRecord]:
    """Return all price records by model and class."""
    found = await session.scalars(select(PriceRecord).order_by(PriceRecord.model, PriceRecord.service_class))
    return found.all()


async def find_price(session: AsyncSession, model: str, service_class: str | None) -> PriceRecord | None:
    """Return the price of exactly this model and class, or None."""
    name = service_class or ANY_CLASS
    could_be = len(model) <= MAX_MODEL_LENGTH and model.isprintable() and name.isprintable()
    return await session.get(PriceRecord, (model, name)) if could_be else None


async def get_price(session: AsyncSession, model: str, service_class: str | None) -> PriceRecord:
    """Return the price of exactly this model and class. Raises NotFound."""
    record = await find_price(session, model, service_class)
    if record is None:
        raise NotFound("There is no price for this model; list them with GET /admin/v1/prices.", param="model")
    return record


async def set_price(session: AsyncSession, new: NewPrice) -> PriceRecord:
    """Set or change a price. Raises BadRequest, or Conflict where there are too many.

    It applies to requests that begin from then on, at every gateway within seconds.
    """
    if not (0 < len(new.model) <= MAX_MODEL_LENGTH and new.model.isprintable()):
        raise BadRequest(f"'model' must have 1 to {MAX_MODEL_LENGTH} printable characters.", param="model")
    service_class = ANY_CLASS if new.service_class is None else await require_class(session, new.service_class)
    cached = new.input if new.cached_input is None else new.cached_input
    price = Price(_parse(new.input, "input"), _parse(cached, "cached_input"), _parse(new.output, "output"))
    if price.cached_input > price.input:
        raise BadRequest("'cached_input' must not be higher than 'input'.", param="cached_input")
    key, advice = {"model": new.model, "service_class": service_class}, "delete some that no engine serves"
    record = await get_or_add(session, PriceRecord, key, MAX_PRICES, "prices", advice)
    record.input, record.cached_input, record.output = price.input, price.cached_input, price.output
    await session.flush()
    return record


async def delete_price(session: AsyncSession, model: str, service_class: str | None) -> PriceRecord:
    """Delete a price; return its last state. Raises NotFound."""
    record = await get_price(session, model, service_class)
    await session.delete(record)
    return record


def _parse(text: str, param: str) -> int:
    try:
        return parse_dollars(text)
    except ValueError as exc:
        raise BadRequest(f"'{param}': {exc}.", param=param) from exc
