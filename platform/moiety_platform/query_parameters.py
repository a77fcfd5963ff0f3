"""Query parameters that lists of the admin API share."""

from __future__ import annotations

from typing import Annotated

from litestar.params import QueryParameter

Limit = Annotated[int | None, QueryParameter(description="Rows of a page, 1 to 500; 50 if not given.")]
Cursor = Annotated[str | None, QueryParameter(description="`next_cursor` of the previous page.")]
