"""Access to the migrations, which this package does not import."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

from moiety_platform.cli.errors import CommandError

MIGRATIONS_GROUP = "moiety.migrations"  # its entry point `upgrade` takes a database URL


def find_upgrade() -> Callable[[str], str]:
    """Return the function that migrates a database. Raises CommandError if it is not installed."""
    found = entry_points(group=MIGRATIONS_GROUP, name="upgrade")
    if not found:
        raise CommandError("no installed package contains the database's migrations; reinstall moiety")
    return cast("Callable[[str], str]", next(iter(found)).load())
