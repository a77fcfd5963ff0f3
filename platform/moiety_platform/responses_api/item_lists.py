"""Lists of items of a stored response or a conversation, as clients request them."""

from __future__ import annotations

from typing import Annotated

from litestar.di import NamedDependency, Provide
from litestar.params import SkipValidation

from moiety_platform.auth.client import AuthenticatedClient
from moiety_platform.db.keyset import After, ListRequest, parse_list
from moiety_platform.query_parameters import one_of, whole

DEFAULT_LIST = 20
MAX_LIST = 100

Limit = Annotated[str | None, whole(f"Largest number of results, {DEFAULT_LIST} if not given.", 1, MAX_LIST)]
Order = Annotated[str | None, one_of("Order of the items in the conversation; desc if not given.", "asc", "desc")]

ListRequestDependency = NamedDependency[SkipValidation[ListRequest]]


def parse_item_list(
    owner: AuthenticatedClient, limit: Limit = None, after: After = None, order: Order = None
) -> ListRequest:
    """Return the part of a list that a client's query parameters request. Raises BadRequest."""
    return parse_list(limit, after, order, default_limit=DEFAULT_LIST, max_limit=MAX_LIST)


ITEM_LIST = {"list_request": Provide(parse_item_list, sync_to_thread=False)}
"""Dependencies of the handlers that take `list_request` as ListRequestDependency."""
