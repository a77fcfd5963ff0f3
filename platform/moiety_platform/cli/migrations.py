"""Access to the migrations, which this package does not import."""

from __future__ import annotations

import os
import subprocess
import sys
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


def downgrade_database(database_url: str, revision: str) -> None:
    """Downgrade a database with the migrations' own program. Raises CommandError."""
    command = [sys.executable, "-P", "-m", "moiety_migrations", "downgrade", revision]
    environment = {**os.environ, "MOIETY_DATABASE_URL": database_url}  # not an argument, which every user can read
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(f"the database cannot be brought to revision {revision}: {done.stderr.strip()}")
