"""Connections to PostgreSQL: to one of several hosts, directly or through a pooler.

A pooler in transaction mode, such as pgbouncer, gives each transaction any free server connection. Therefore no setting
and no lock here outlives a transaction. Through a pooler no prepared statement does either, because the next server
connection may not know its name, or may use it for another client. There a prepared statement has no name, and is
prepared within the transaction that uses it.

A new connection detects the pooler: the backend PID that it reports differs from the one that runs its statements.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg
import structlog
from sqlalchemy import Dialect
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.util import await_only

from moiety_platform.db.connecting import OpenConnections
from moiety_platform.db.connection_errors import NoConnection
from moiety_platform.db.postgres_url import PostgresUrl, asyncpg_dsn
from moiety_platform.db.url_errors import BadDatabaseUrl

NUM_PREPARED = 100  # statements that a direct connection keeps

_ABOUT = "SELECT pg_backend_pid(), pg_is_in_recovery(), current_setting('transaction_read_only') = 'on'"
_ANY = "any"

_log = structlog.get_logger(__name__)


class PostgresConnection(asyncpg.Connection):  # type: ignore[misc]  # the driver has no types
    """Connection that looks up types in a transaction.

    A pooler then uses the same server connection for the statement and its execution.
    """

    async def set_type_codec(self, *arguments: Any, **options: Any) -> None:
        """Set how values of a type are encoded and decoded."""
        async with self.transaction():
            await super().set_type_codec(*arguments, **options)


class PostgresConnector:
    """Factory for the connections of one engine."""

    def __init__(
        self, url: PostgresUrl, opened: OpenConnections, *, connect_timeout_s: float, statement_timeout_s: float
    ) -> None:
        """Check the files that the URL names. Raises BadDatabaseUrl if a certificate or key cannot be read."""
        self._url, self._opened = url, opened
        self._has_pooler = False
        self._timeout_s = connect_timeout_s if url.connect_timeout_s is None else url.connect_timeout_s
        self._statement_timeout_s = statement_timeout_s
        self._has_logged_pooler = False
        for name in ("sslcert", "sslkey", "sslrootcert", "sslcrl"):
            path = url.parameters.get(name, "")
            if path and not (name == "sslrootcert" and url.trusts_system):
                _check_readable(name, path)

    def connect(self, dialect: Dialect, _arguments: list[Any], _options: dict[str, Any]) -> DBAPIConnection:
        """Open a connection, in a greenlet of SQLAlchemy. Raises NoConnection."""
        opened, is_pooled = await_only(self._open())
        self._has_pooler |= is_pooled
        self._opened.are_direct = not self._has_pooler

        async def give() -> PostgresConnection:
            return opened

        connection: DBAPIConnection = dialect.connect(
            async_creator_fn=give,
            prepared_statement_cache_size=0 if is_pooled else NUM_PREPARED,
            prepared_statement_name_func=_no_name if is_pooled else _names(),
        )
        return connection

    async def _open(self) -> tuple[PostgresConnection, bool]:
        """Return a connection to a host whose session matches the URL, and whether it goes through a pooler."""
        reason: BaseException | str = ""
        for host, port, session in self._attempts():
            try:
                opened = await self._connect_to(host, port)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
                reason = error
                if isinstance(error, OSError | asyncpg.CannotConnectNowError):
                    continue  # try the next host, as libpq does; all hosts would refuse the same credentials
                break
            try:
                async with opened.transaction():
                    server_pid, is_standby, is_read_only = await opened.fetchrow(_ABOUT)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
                opened.terminate()
                reason = error
                break
            except BaseException:
                opened.terminate()
                raise
            if _suits(session, is_standby=is_standby, is_read_only=is_read_only):
                is_pooled = self._url.is_pooled or server_pid != opened.get_server_pid()
                self._log_pooler(is_pooled)
                return opened, is_pooled
            opened.terminate()
            reason = f"no host is {session}, which target_session_attrs asks for"
        cause = reason if isinstance(reason, BaseException) else None
        raise NoConnection(_explained(reason)) from cause

    def _attempts(self) -> Iterator[tuple[str | None, int | None, str]]:
        """Yield the hosts in the order of the attempts, with the session type that each must have."""
        hosts: list[tuple[str | None, int | None]] = [*self._url.hosts] or [(None, None)]
        if self._url.parameters.get("load_balance_hosts") == "random":
            random.SystemRandom().shuffle(hosts)
        prefers_standby = self._url.session_role == "prefer-standby"
        for session in ("standby", _ANY) if prefers_standby else (self._url.session_role,):
            yield from ((host, port, session) for host, port in hosts)

    async def _connect_to(self, host: str | None, port: int | None) -> PostgresConnection:
        options: dict[str, Any] = {"ssl": self._system_tls()} if self._url.trusts_system else {}
        try:
            opened: PostgresConnection = await asyncpg.connect(
                asyncpg_dsn(self._url, host, port),
                connection_class=PostgresConnection,
                server_settings=self._url.server_settings,
                statement_cache_size=0,  # the driver's own cache, in addition to SQLAlchemy's
                timeout=None if self._timeout_s == float("inf") else self._timeout_s,
                command_timeout=self._statement_timeout_s,
                **options,
            )
            return opened
        except TimeoutError as error:
            raise TimeoutError(f"{host or 'the server'} did not answer within {self._timeout_s:g} s") from error

    def _system_tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        certificate = self._url.parameters.get("sslcert")
        if certificate:
            secret = self._url.parameters.get("sslpassword", "")
            context.load_cert_chain(certificate, self._url.parameters.get("sslkey"), lambda: secret)
        return context

    def _log_pooler(self, is_pooled: bool) -> None:
        if is_pooled and not self._has_logged_pooler:
            _log.info("database_behind_pooler", prepared_statements="within a transaction only")
        self._has_logged_pooler = is_pooled


def _no_name() -> str:
    """Return the empty name of a prepared statement that the next one replaces."""
    return ""


def _names() -> Callable[[], str]:
    """Return a function that yields a new name for each prepared statement of one connection."""
    numbers = count(1)
    return lambda: f"moiety_{next(numbers)}"


def _suits(session: str, *, is_standby: bool, is_read_only: bool) -> bool:
    """Return whether the session is of the type that `target_session_attrs` requires."""
    if session in ("primary", "standby"):
        return is_standby == (session == "standby")
    if session in ("read-write", "read-only"):
        return is_read_only == (session == "read-only")
    return True


def _explained(reason: BaseException | str) -> str:
    """Return the reason in one line, with what to do if a pooler lacks a feature."""
    told = " ".join(str(reason).split()) or type(reason).__name__
    if "unsupported startup parameter" in told:
        return (
            f"{told}: the pooler does not pass it on; remove it from the URL and set it for the role "
            "(ALTER ROLE … SET …), or add it to the pooler's ignore_startup_parameters"
        )
    if "statement pooling" in told:
        return f"{told}: set the pooler's pool_mode to transaction or session"
    return told


def _check_readable(name: str, path: str) -> None:
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise BadDatabaseUrl(f"{name}={path} of the database's URL cannot be read: {error.strerror}") from error
