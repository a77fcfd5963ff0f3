"""Command `moiety usage restore`: writes quarantined usage rows to the database."""

from __future__ import annotations

import asyncio

import typer

from moiety_platform.cli.deployment_options import DatabaseOptions
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.option_groups import with_option_groups
from moiety_platform.cli.printing import print_line
from moiety_platform.db.session import Database
from moiety_platform.db.url_errors import BadDatabaseUrl
from moiety_platform.errors import PlatformError
from moiety_platform.settings import GatewaySettings
from moiety_platform.usage.quarantined_rows import DAMAGED, REFUSED, QuarantinedUsage
from moiety_platform.usage.recorder import storable
from moiety_platform.usage.rejected_rows import REFUSALS
from moiety_platform.usage.row import UsageRow
from moiety_platform.usage.store import insert_rows


@with_option_groups
def restore(stores: DatabaseOptions) -> None:
    """Write quarantined usage rows to the database.

    Run it where the gateway's data directory is, and again if it was interrupted: each request is billed once. Ends
    with 1 if some remain.
    """
    settings = stores.load_settings()
    try:
        restored, left = asyncio.run(restore_rows(settings))
    except (BadDatabaseUrl, PlatformError, OSError) as exc:
        raise CommandError(f"{exc} No quarantined row is lost.") from exc
    folder = settings.usage_journal_dir
    print_line(f"{restored} usage rows of {folder} are in the database; {left} rows and lines remain")
    if left:
        print_line(f"look at {folder / REFUSED} and {folder / DAMAGED}, bill them by hand, and then delete them")
        raise typer.Exit(1)


async def restore_rows(settings: GatewaySettings) -> tuple[int, int]:
    """Store the rows; return how many were stored, and how many rows and lines remain. Raises Unavailable."""
    database = Database.open(settings.store_url)

    async def store(row: UsageRow) -> bool:
        try:
            async with database.write() as session:
                await insert_rows(session, [storable(row)])
        except REFUSALS:
            return False
        return True

    try:
        return await QuarantinedUsage(settings.usage_journal_dir).restore(store)
    finally:
        await database.close()
