"""URL of the trace store."""

from __future__ import annotations

import re

TRACES_FILE = "traces.db"
_SQLITE_FILE = re.compile(r"(sqlite(?:\+\w+)?:///(?:.*/)?)[^/?]+", re.DOTALL)


def traces_beside(store_url: str) -> str:
    """Return the default URL of the trace store.

    Beside a SQLite store it is a file of its own, since SQLite has one writer and spans would delay the ledger; on
    PostgreSQL it is the same database.
    """
    found = _SQLITE_FILE.fullmatch(store_url)
    return store_url if found is None else found[1] + TRACES_FILE
