"""Backup of a deployment while its gateways serve.

The order gives one state: usage journal, database, objects. A usage row that leaves the journal in between is in the
database; an object of a row of the database is in the store, unless it was deleted in between.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.pepper import FILE_NAME, pepper_of, pepper_rotation_of
from moiety_platform.backups.archive import (
    FIRST_KEYS,
    FORMAT,
    JOURNAL,
    PEPPERS,
    RECEIPT_KEYS,
    SECRETS,
    SQLITE_FILE,
    BackupManifest,
    TableCopy,
    write_archive_index,
)
from moiety_platform.backups.databases import backed_up_tables, close_sqlite_file, copy_sqlite, count_rows, dump_tables
from moiety_platform.backups.errors import BackupError
from moiety_platform.backups.objects import referenced_objects, save_objects
from moiety_platform.db.session import MAINTENANCE, Database
from moiety_platform.db.url import sqlite_path
from moiety_platform.object_storage.models import ObjectStoreRecord
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.object_store_url import local_folder, redacted
from moiety_platform.receipts.signing import key_file_of
from moiety_platform.settings import GatewaySettings
from moiety_platform.usage.reconciliation import take_snapshot_locks


async def create_backup(
    settings: GatewaySettings, target: Path, release: str, *, copy_objects: bool | None = None
) -> BackupManifest:
    """Write a backup to the folder `target`, which must not exist or be empty; return its manifest.

    All files have the mode 0600; the peppers, the keys of the first start and those that sign receipts are
    among them, in clear text.
    `copy_objects` says whether the contents of files and adapters are copied: by default those of a folder, not those
    of a bucket. The folder appears once it is complete. Raises BackupError, BadPepper, BadDatabaseUrl, Unavailable or
    OSError.
    """
    draft = _begin(settings, target)
    try:
        manifest = await _fill(settings, draft, release, copy_objects)
        await asyncio.to_thread(_publish, draft, target, manifest)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return manifest


def _begin(settings: GatewaySettings, target: Path) -> Path:
    """Check that there is something to back up and a place for it; return a new folder beside the target."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BackupError(f"{target} exists already; give a new folder for each backup")
    path = sqlite_path(settings.store_url)
    if path is not None and not path.exists():
        raise BackupError(f"there is no database {path}; give the gateway's --data-dir, --database-url or --config")
    pepper = settings.data_dir / FILE_NAME
    if settings.key_pepper is None and not pepper.exists():
        raise BackupError(
            f"there is no pepper {pepper}, without which no key of a backup works; give the gateway's --data-dir, or "
            "MOIETY_KEY_PEPPER"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    draft.mkdir(mode=0o700)
    return draft


def _publish(draft: Path, target: Path, manifest: BackupManifest) -> None:
    """Complete the backup, and give it its name."""
    write_archive_index(draft, manifest)
    if target.exists():
        target.rmdir()
    draft.rename(target)
    _sync_folder(target.parent)


async def _fill(settings: GatewaySettings, folder: Path, release: str, copy_objects: bool | None) -> BackupManifest:
    _copy_journal(settings.usage_journal_dir, folder / JOURNAL)
    created_at = datetime.now(UTC)
    async with _snapshot(settings, folder) as (session, tables):
        revision = await session.scalar(text("SELECT version_num FROM alembic_version"))
        objects = await referenced_objects(session)
        mark = await session.scalar(select(ObjectStoreRecord.mark))
        dialect = session.get_bind().dialect.name
    has_objects = local_folder(settings.objects_url) is not None if copy_objects is None else copy_objects
    lost = []
    if has_objects and objects:
        store = ObjectStore.open(settings.objects_url)
        try:
            lost = await save_objects(store, objects, folder)
        finally:
            await store.close()
    _write_secrets(settings, folder / SECRETS)
    return BackupManifest(
        format=FORMAT,
        release=release,
        created_at=created_at,
        dialect=dialect,
        revision=str(revision),
        tables=tables,
        object_store=redacted(settings.objects_url),
        store_mark=mark,
        has_objects=has_objects,
        objects=objects,
        lost_objects=lost,
    )


@asynccontextmanager
async def _snapshot(settings: GatewaySettings, folder: Path) -> AsyncIterator[tuple[AsyncSession, list[TableCopy]]]:
    """Copy the database; yield a session that reads the copied state, and the tables."""
    path, url = sqlite_path(settings.store_url), settings.store_url
    if path is not None:
        await asyncio.to_thread(copy_sqlite, path, folder / SQLITE_FILE)
        url = f"sqlite+aiosqlite:///{(folder / SQLITE_FILE).absolute()}"
    database = Database.open(url, pool=MAINTENANCE)
    try:
        async with database.read() as session:
            await take_snapshot_locks(session)
            await session.execute(text("SELECT 1"))  # begins the transaction
            if path is not None:
                tables = await count_rows(session, backed_up_tables())
            else:
                tables = await dump_tables(session, folder)
            yield session, tables
    finally:
        await database.close()
        if path is not None:
            close_sqlite_file(folder / SQLITE_FILE)


def _copy_journal(source: Path, target: Path) -> None:
    target.mkdir(mode=0o700)
    for path in sorted(source.glob("*")) if source.is_dir() else ():
        if path.is_file() and path.suffix != ".lock":
            try:
                shutil.copyfile(path, target / path.name)
            except FileNotFoundError:  # its rows are in the database now
                (target / path.name).unlink(missing_ok=True)


def _write_secrets(settings: GatewaySettings, folder: Path) -> None:
    """Write the peppers, newest first, and, if there are any, the keys of the first start and of receipts."""
    folder.mkdir(mode=0o700)
    rotation = pepper_rotation_of(settings)
    peppers = [one for one in (rotation.coming, pepper_of(settings), rotation.previous) if one is not None]
    for number, pepper in enumerate(dict.fromkeys(peppers), start=1):
        (folder / PEPPERS.format(number)).write_bytes(pepper + b"\n")
    first_keys = settings.data_dir / FIRST_KEYS
    if first_keys.exists():
        shutil.copyfile(first_keys, folder / FIRST_KEYS)
    receipt_keys = key_file_of(settings.receipt_key_file, settings.data_dir)
    if receipt_keys.exists():
        shutil.copyfile(receipt_keys, folder / RECEIPT_KEYS)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
