"""Errors of database URLs."""


class BadDatabaseUrl(ValueError):
    """The URL names no database that this program supports; the message says what to give instead."""
