"""Database URLs as people write them, converted to those that the drivers accept. Pure; imports no driver."""

from __future__ import annotations

import re
from pathlib import Path

from moiety_platform.db.postgres_url import BadPostgresUrl, PostgresUrl, parse_postgres_url
from moiety_platform.db.url_errors import BadDatabaseUrl
from moiety_platform.redaction import hide_url_passwords

_SQLITE_SCHEMES = frozenset({"sqlite", "sqlite+aiosqlite", "sqlite+pysqlite"})
_POSTGRES_SCHEMES = frozenset({"postgres", "postgresql", "postgresql+asyncpg", "postgresql+psycopg"})
_HINT = "give sqlite:///path/to/file.db or postgresql://user:password@host/database"


def to_sync_url(url: str) -> str:
    """Return the URL for SQLAlchemy's sync engine (sqlite3 or psycopg), which migrations use. Raises BadDatabaseUrl."""
    path = sqlite_path(url)
    if path is not None:
        return f"sqlite+pysqlite:///{path}"
    return postgres_url(url).to_libpq("postgresql+psycopg")


def to_libpq_url(url: str) -> str:
    """Return the URL for libpq; PostgreSQL only. Raises BadDatabaseUrl."""
    return postgres_url(url).to_libpq()


def postgres_url(url: str) -> PostgresUrl:
    """Parse a PostgreSQL URL. Raises BadDatabaseUrl."""
    if _scheme(url) in _SQLITE_SCHEMES:
        raise BadDatabaseUrl(f"{redact(url)!r} is SQLite, but PostgreSQL is needed here; {_HINT}")
    try:
        return parse_postgres_url(url.split("://", 1)[1])
    except BadPostgresUrl as error:
        raise BadDatabaseUrl(f"{redact(url)!r} cannot be used: {error}") from error


def sqlite_path(url: str) -> Path | None:
    """Return the file of a SQLite URL; None for PostgreSQL. Raises BadDatabaseUrl for any other URL."""
    scheme = _scheme(url)
    if scheme in _POSTGRES_SCHEMES:
        return None
    location, _, query = url.split("://", 1)[1].partition("?")
    if location and not location.startswith("/"):
        raise BadDatabaseUrl(f"{redact(url)!r} needs three slashes before the file's path; {_HINT}")
    file = location[1:]
    if not file or file == ":memory:" or file.startswith("file:") or query:
        raise BadDatabaseUrl(f"{redact(url)!r} must name a plain file, since several processes share it; {_HINT}")
    return Path(file)


def redact(url: str) -> str:
    """Return the URL without its password, for messages and logs."""
    return hide_url_passwords(re.sub(r"(?i)(password=)[^&]*", r"\1***", url), "***")


def _scheme(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SQLITE_SCHEMES | _POSTGRES_SCHEMES:
        raise BadDatabaseUrl(f"{redact(url)!r} is not a supported database URL; {_HINT}")
    return scheme
