"""Pagination as in OpenAI's API: after the object with a given id, by creation time, in either direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypedDict, TypeVar

from litestar.params import QueryParameter
from sqlalchemy import Select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from moiety_platform.errors import BadRequest
from moiety_platform.query_parameters import parse_whole

Row = TypeVar("Row")

After = Annotated[str | None, QueryParameter(description="Id of the last object of the previous page.")]


class Identified(TypedDict):
    """Object of a list."""

    id: str


View = TypeVar("View", bound=Identified)


class Listing(TypedDict, Generic[View]):
    """Page of objects; `has_more` says whether others follow after `last_id`."""

    object: Literal["list"]
    data: list[View]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True, slots=True)
class ListRequest:
    """Requested page of a list: at most `limit` rows after the row with the id `after`."""

    limit: int
    after: str | None = None
    newest_first: bool = True


def parse_list(
    limit: str | None, after: str | None, order: str | None, *, default_limit: int, max_limit: int
) -> ListRequest:
    """Return the page that a client requests. Raises BadRequest."""
    size = default_limit if limit is None else parse_whole(limit, "limit")
    if not 1 <= size <= max_limit:
        raise BadRequest(f"'limit' must be between 1 and {max_limit:,}, not {size}", param="limit")
    if order not in (None, "asc", "desc"):
        raise BadRequest("'order' must be 'asc' or 'desc'", param="order")
    return ListRequest(size, after, order != "asc")


async def read_list(
    session: AsyncSession,
    statement: Select[Row],
    list_request: ListRequest,
    created: InstrumentedAttribute[int],
    row_id: InstrumentedAttribute[str],
) -> tuple[Sequence[Row], bool]:
    """Return the requested page of the statement's rows, and whether more follow.

    Raises BadRequest if `after` is not the id of one of the statement's rows.
    """
    if list_request.after is not None:
        position = statement.with_only_columns(created, row_id).where(row_id == list_request.after[:64])
        last = (await session.execute(position)).first()
        if last is None:
            raise BadRequest("'after' must be the id of an object in this list", param="after")
        here = tuple_(created, row_id)
        statement = statement.where(here < tuple(last) if list_request.newest_first else here > tuple(last))
    order = (created.desc(), row_id.desc()) if list_request.newest_first else (created.asc(), row_id.asc())
    found = (await session.scalars(statement.order_by(*order).limit(list_request.limit + 1))).all()
    return found[: list_request.limit], len(found) > list_request.limit


def list_fields(views: Sequence[View], has_more: bool) -> Listing[View]:
    """Return the response body of a page."""
    first, last = (views[0]["id"], views[-1]["id"]) if views else (None, None)
    return {"object": "list", "data": list(views), "first_id": first, "last_id": last, "has_more": has_more}
