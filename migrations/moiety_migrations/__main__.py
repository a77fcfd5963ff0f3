"""Command line: `python -m moiety_migrations upgrade|current|downgrade`.

Without --database-url it reads MOIETY_DATABASE_URL, else MOIETY_DATA_DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from moiety_migrations.errors import DatabaseUnreachable, MigrationError
from moiety_migrations.revisions import HEAD
from moiety_migrations.run import current, downgrade, upgrade
from moiety_platform.db.url import redact
from moiety_platform.db.url_errors import BadDatabaseUrl

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_REACHABLE = 3
DEFAULT_DATA_DIR = ".moiety"
PAUSE_S = 2.0


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 1 refused, 2 wrong usage, 3 database unreachable.

    `current` returns 1 when the database is not at this release's revision.
    """
    options = _parser().parse_args(arguments)
    url = options.database_url or os.environ.get("MOIETY_DATABASE_URL") or default_url(os.environ)
    try:
        return _run(options, url)
    except BadDatabaseUrl as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    except MigrationError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_NOT_REACHABLE if isinstance(error, DatabaseUnreachable) else EXIT_FAILED


def default_url(environment: Mapping[str, str]) -> str:
    """Return the database that a gateway uses by default in the same environment."""
    return f"sqlite:///{Path(environment.get('MOIETY_DATA_DIR') or DEFAULT_DATA_DIR) / 'moiety.db'}"


def _run(options: argparse.Namespace, url: str) -> int:
    if options.command == "upgrade":
        found: str | None = _upgrade_within(url, options.wait_s)
    elif options.command == "downgrade":
        found = downgrade(url, options.revision)
    else:
        found = current(url)
    if options.json:
        print(json.dumps({"database": redact(url), "revision": found, "head": HEAD}))  # noqa: T201
    else:
        print(f"the database {redact(url)} is at {found or 'no revision yet'}; this release needs {HEAD}")  # noqa: T201
    return EXIT_FAILED if options.command == "current" and found != HEAD else 0


def _upgrade_within(url: str, wait_s: float) -> str:
    """Retry the upgrade until the database is reachable, for at most `wait_s` seconds. Raises what `upgrade` raises."""
    until = time.monotonic() + wait_s
    while True:
        try:
            return upgrade(url)
        except DatabaseUnreachable as error:
            if time.monotonic() + PAUSE_S > until:
                raise
            print(f"waiting for the database: {error}", file=sys.stderr)  # noqa: T201
            time.sleep(PAUSE_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moiety migrate", description="Bring the database to this release's schema.")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--database-url",
        help="sqlite:///FILE or postgresql://… (or MOIETY_DATABASE_URL; default moiety.db in MOIETY_DATA_DIR, "
        f"or else in {DEFAULT_DATA_DIR})",
    )
    shared.add_argument("--json", action="store_true", help="print one JSON object")
    commands = parser.add_subparsers(dest="command", required=True)
    forth = commands.add_parser("upgrade", parents=[shared], help="migrate to this release's revision")
    forth.add_argument("--wait-s", type=float, default=0, help="try for so long if the database is not there; 0: once")
    commands.add_parser("current", parents=[shared], help="show the revision; exit code 1 if an upgrade is needed")
    back = commands.add_parser("downgrade", parents=[shared], help="go back; loses what the earlier schema cannot hold")
    back.add_argument("revision", help='a revision, or "base" for an empty database')
    return parser


if __name__ == "__main__":
    sys.exit(main())
