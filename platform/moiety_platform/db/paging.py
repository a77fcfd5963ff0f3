"""Keyset pagination: a page ends with a cursor that names its last row, so that rows added meanwhile shift nothing."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from litestar.di import NamedDependency
from litestar.params import SkipValidation
from sqlalchemy import Select, literal, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from moiety_platform.errors import BadRequest
from moiety_platform.query_parameters import Cursor, parse_whole, whole

DEFAULT_LIMIT = 50
MAX_LIMIT = 500

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

Limit = Annotated[str | None, whole(f"Rows of a page, {DEFAULT_LIMIT} if not given.", 1, MAX_LIMIT)]

Row = TypeVar("Row")


class Page(msgspec.Struct, Generic[Row], frozen=True):
    """A page of a list; `next_cursor` is null on the last page."""

    data: list[Row]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class Position:
    """End of a page: the last row's time and id."""

    at: datetime
    row_id: str


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Requested page: at most `limit` rows after `after`."""

    limit: int = DEFAULT_LIMIT
    after: Position | None = None


PageRequestDependency = NamedDependency[SkipValidation[PageRequest]]


def parse_page(limit: Limit = None, cursor: Cursor = None) -> PageRequest:
    """Return the page that a client's query parameters request. Raises BadRequest.

    It provides the dependency `page` of the handlers that take a `PageRequestDependency`.
    """
    wanted = DEFAULT_LIMIT if limit is None else parse_whole(limit, "limit")
    if not 1 <= wanted <= MAX_LIMIT:
        raise BadRequest(f"'limit' must be between 1 and {MAX_LIMIT}, not {wanted}.", param="limit")
    after = decode_cursor(cursor) if cursor else None
    return PageRequest(limit=wanted, after=after)


def encode_cursor(position: Position) -> str:
    """Return an opaque, URL-safe cursor."""
    at_us = (position.at - _EPOCH) // _MICROSECOND
    return base64.urlsafe_b64encode(f"{at_us}:{position.row_id}".encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> Position:
    """Return the position in a cursor; the inverse of `encode_cursor`. Raises BadRequest for any other text."""
    try:
        if len(cursor) > 400:
            raise ValueError("too long")
        plain = base64.b64decode((cursor + "=" * (-len(cursor) % 4)).encode("ascii"), b"-_", validate=True).decode()
        at_us, separator, row_id = plain.partition(":")
        if not separator or not row_id.isprintable():
            raise ValueError("not a position")
        return Position(at=_EPOCH + int(at_us) * _MICROSECOND, row_id=row_id)
    except (ValueError, binascii.Error, OverflowError) as exc:
        raise BadRequest(
            "'cursor' was not issued by this server; pass 'next_cursor' of the previous page unchanged.",
            param="cursor",
        ) from exc


def after_position(
    statement: Select[Any],
    page: PageRequest,
    at: InstrumentedAttribute[datetime],
    row_id: InstrumentedAttribute[str],
    *,
    newest_first: bool,
) -> Select[Any]:
    """Return the statement, ordered by (at, row_id), from the page's position, with one row more than requested.

    From the extra row `cut_page` sees whether another page follows.
    """
    key = tuple_(at, row_id)
    if page.after is not None:
        last = tuple_(literal(page.after.at, at.type), literal(page.after.row_id, row_id.type))
        statement = statement.where(key < last if newest_first else key > last)
    order = (at.desc(), row_id.desc()) if newest_first else (at.asc(), row_id.asc())
    return statement.order_by(*order).limit(page.limit + 1)


def cut_page(
    rows: Sequence[Row], page: PageRequest, position_of: Callable[[Row], Position]
) -> tuple[Sequence[Row], str | None]:
    """Return the page's rows and the cursor of the next page, None if this is the last."""
    if len(rows) <= page.limit:
        return rows, None
    kept = rows[: page.limit]
    return kept, encode_cursor(position_of(kept[-1]))


async def read_page(
    session: AsyncSession,
    statement: Select[Row],
    page: PageRequest,
    at: InstrumentedAttribute[datetime],
    row_id: InstrumentedAttribute[str],
    *,
    newest_first: bool = False,
) -> tuple[Sequence[Row], str | None]:
    """Return the page's rows, ordered by (at, row_id), and the cursor of the next page, None if this is the last."""
    ordered = after_position(statement, page, at, row_id, newest_first=newest_first)
    found = (await session.scalars(ordered)).all()
    return cut_page(found, page, lambda row: Position(getattr(row, at.key), getattr(row, row_id.key)))
