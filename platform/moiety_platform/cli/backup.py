"""Commands `moiety backup` and `moiety restore`: the state of a deployment in a folder, and back."""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from moiety_platform.auth.pepper import BadPepper
from moiety_platform.backups.archive import BackupManifest, read_archive
from moiety_platform.backups.backup import create_backup
from moiety_platform.backups.errors import BackupError
from moiety_platform.backups.restore import Migrations, restore_backup
from moiety_platform.cli.admin_command import AsJson
from moiety_platform.cli.deployment_options import StoreOptions
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.migrations import downgrade_database, find_upgrade
from moiety_platform.cli.option_groups import with_option_groups
from moiety_platform.cli.printing import print_prose
from moiety_platform.cli.tables import show_json, show_row
from moiety_platform.db.url_errors import BadDatabaseUrl
from moiety_platform.errors import PlatformError
from moiety_platform.supervisor.data_dir import PRIVATE_UMASK, DataDir
from moiety_platform.supervisor.errors import SupervisorError

FAILURES = (BackupError, BadPepper, BadDatabaseUrl, PlatformError, SupervisorError, OSError)


@with_option_groups
def backup(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="New folder for the backup. It appears once the backup is complete.")
    ],
    objects: Annotated[
        bool | None,
        typer.Option(
            "--objects/--no-objects",
            help="Copy the contents of files and adapters. If not given, those of a folder, and not those of a bucket.",
        ),
    ] = None,
    *,
    stores: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Back up the database, the pepper, unbilled usage rows and stored files, while the gateways serve.

    The folder contains the pepper, the keys that sign receipts and, of a moiety serve, the first keys in clear text.
    All files have the mode 0600. Run it with the gateway's settings, where its data directory is.
    """
    os.umask(PRIVATE_UMASK)
    settings = stores.load_settings()
    try:
        made = asyncio.run(create_backup(settings, output, package_version("moiety"), copy_objects=objects))
    except FAILURES as exc:
        raise CommandError(f"no backup was made: {exc}") from exc
    show_manifest(output, made, as_json)
    if made.lost_objects:
        print_prose(
            f"{len(made.lost_objects)} stored objects are missing or damaged, such as {made.lost_objects[0]}: they "
            "were deleted during the backup, or the object store has lost them"
        )


@with_option_groups
def restore(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder that moiety backup has written.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Check the version and the checksums, and do nothing else.")
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace the contents of a database and object store that are not empty."),
    ] = False,
    *,
    stores: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Restore a backup to an empty data directory, database and object store, and verify the result.

    Stop the gateways of the target first. Ends with 1 if the usage ledger, the audit log, a key or a stored object of
    the result is not as it was.
    """
    os.umask(PRIVATE_UMASK)
    try:
        if check:
            show_manifest(folder, read_archive(folder), as_json)
            return
        settings = stores.load_settings()
        with DataDir(settings.data_dir):  # so that no serve starts in between
            report = asyncio.run(
                restore_backup(folder, settings, Migrations(find_upgrade(), downgrade_database), overwrite=overwrite)
            )
    except FAILURES as exc:
        raise CommandError(str(exc)) from exc
    shown = msgspec.to_builtins(report)
    if as_json:
        show_json(shown)
    else:
        show_row({**shown, "problems": len(report.problems) or None, "notices": None}, as_json=False)
        for notice in report.notices:
            print_prose(notice)
    if report.problems:
        raise CommandError("\n".join(("the restored state is not that of the backup:", *report.problems)))


def show_manifest(folder: Path, manifest: BackupManifest, as_json: bool) -> None:
    """Show what a backup holds."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shown: dict[str, Any] = {
        "folder": str(folder),
        "created_at": manifest.created_at.isoformat(),
        "release": manifest.release,
        "database": f"{manifest.dialect}, revision {manifest.revision}",
        "tables": len(manifest.tables),
        "rows": sum(one.rows for one in manifest.tables),
        "object_store": manifest.object_store,
        "objects": len(manifest.objects),
        "objects_copied": manifest.has_objects,
        "lost_objects": len(manifest.lost_objects),
        "bytes": size,
    }
    show_row(shown, as_json)
