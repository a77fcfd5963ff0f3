"""Errors of connections to a database."""


class NoConnection(ConnectionError):
    """PostgreSQL, or the pooler before it, refused the connection; the message says why and, if known, what to do."""
