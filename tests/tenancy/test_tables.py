"""The tables of the platform, as backups and migrations load them."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

from moiety_platform.backups.databases import LEFT_OUT


def test_a_backup_has_every_table_of_a_migrated_database(migrated_sqlite: Path) -> None:
    program = "from moiety_platform.backups.databases import *; print(*(one.name for one in backed_up_tables()))"
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    with contextlib.closing(sqlite3.connect(migrated_sqlite)) as connection:
        made = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    own = {name for name in made if not name.startswith("sqlite_")}
    assert own - set(told.split()) == {*LEFT_OUT, "alembic_version"}
