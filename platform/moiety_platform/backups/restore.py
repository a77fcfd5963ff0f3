"""Restore of a backup to an empty data directory and database, and its verification."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from sqlalchemy import or_, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.audit.stored_chain import verify_stored_chain
from moiety_platform.auth.keys import mark_of
from moiety_platform.auth.pepper import FILE_NAME, PREVIOUS_FILE_NAME
from moiety_platform.backups.archive import (
    FIRST_KEYS,
    JOURNAL,
    PEPPERS,
    RECEIPT_KEYS,
    SECRETS,
    SQLITE_FILE,
    BackupManifest,
    read_archive,
)
from moiety_platform.backups.databases import backed_up_tables, count_rows, holds_data, load_copies, replace_sqlite
from moiety_platform.backups.errors import BackupError
from moiety_platform.backups.objects import put_mark, put_objects, stored_keys
from moiety_platform.db.session import MAINTENANCE, Database
from moiety_platform.db.url import sqlite_path
from moiety_platform.object_storage.readiness import MARK_KEY
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.private_files import write_private
from moiety_platform.receipts.signing import BadReceiptKey, key_file_of, load_signer
from moiety_platform.receipts.stored_chains import StoredChains, verify_stored_chains
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenants.models import ApiKey
from moiety_platform.usage.reconciliation import reconcile, take_snapshot_locks

FIRST_USAGE = datetime(2000, 1, 1, tzinfo=UTC)  # before any usage
MAX_PEPPERS = 2  # that a data directory holds


@dataclass(frozen=True, slots=True)
class Migrations:
    """Migrations of a database by its URL: to this release's revision, or back to an earlier one."""

    upgrade: Callable[[str], object]
    downgrade: Callable[[str, str], object]


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a restore. `problems` has a sentence for each check that failed, `notices` say what to do next."""

    created_at: datetime
    release: str
    tables: int
    rows: int
    requests: int
    audit_entries: int
    audit_head: str
    objects: int
    journal_files: int
    receipts: int
    receipt_key: str | None
    problems: list[str]
    notices: list[str]


async def restore_backup(
    folder: Path, settings: GatewaySettings, migrations: Migrations, *, overwrite: bool = False
) -> RestoreReport:
    """Restore a backup to the stores of the settings, whose gateways are stopped; verify the result.

    Raises BackupError if the backup is damaged or does not fit the target, or, without `overwrite`, if a store is not
    empty; nothing is changed then. Raises BadDatabaseUrl, Unavailable or OSError.
    """
    manifest = await asyncio.to_thread(read_archive, folder)
    peppers = _peppers(folder, settings)
    path = sqlite_path(settings.store_url)
    if (dialect := "postgresql" if path is None else "sqlite") != manifest.dialect:
        raise BackupError(f"the backup is of {manifest.dialect}, and the target is {dialect}; give --database-url")
    store = ObjectStore.open(settings.objects_url)
    try:
        await _check_target(folder, manifest, settings, store, overwrite=overwrite)
        if path is not None:
            await asyncio.to_thread(replace_sqlite, folder / SQLITE_FILE, path)
            await asyncio.to_thread(migrations.upgrade, settings.store_url)
        else:
            await _load_postgres(folder, manifest, settings.store_url, migrations)
        if manifest.has_objects:
            await put_objects(store, manifest.objects, folder)
        if manifest.store_mark is not None:
            await put_mark(store, manifest.store_mark)
        num_journal = _write_files(folder, settings, peppers)
        return await _verify(manifest, settings, store, peppers, num_journal)
    finally:
        await store.close()


def _peppers(folder: Path, settings: GatewaySettings) -> list[bytes]:
    """Return the backup's peppers, newest first. Raises BackupError if the target's environment has another."""
    files = sorted((folder / SECRETS).glob(PEPPERS.format("*")))
    peppers = [file.read_bytes().strip() for file in files]
    if not peppers:
        raise BackupError(f"{folder} has no pepper, without which no key works; use another copy of the backup")
    if settings.key_pepper is not None:
        given = settings.key_pepper.get_secret_value().encode()
        if given not in peppers:
            raise BackupError("MOIETY_KEY_PEPPER is not a pepper of this backup: unset it, or set it to the backup's")
    elif len(peppers) > MAX_PEPPERS:
        raise BackupError(
            f"the backup was made during a change of the pepper, with {len(peppers)} of them: set MOIETY_KEY_PEPPER, "
            f"MOIETY_KEY_PEPPER_NEXT and MOIETY_KEY_PEPPER_PREVIOUS to those in {folder / SECRETS}"
        )
    return peppers


async def _check_target(
    folder: Path, manifest: BackupManifest, settings: GatewaySettings, store: ObjectStore, *, overwrite: bool
) -> None:
    """Raise BackupError if the target holds something that the restore would replace, unless that is wanted."""
    held = []
    path = sqlite_path(settings.store_url)
    if path is None or path.exists():
        database = Database.open(settings.store_url, pool=MAINTENANCE)
        try:
            if await holds_data(database):
                held.append("the database has tenants or keys")
        finally:
            await database.close()
    if settings.key_pepper is None and (settings.data_dir / FILE_NAME).exists():
        held.append(f"{settings.data_dir} has a pepper")
    kept, receipt_keys = _receipt_keys(folder), key_file_of(settings.receipt_key_file, settings.data_dir)
    if kept is not None and receipt_keys.exists() and receipt_keys.read_bytes() != kept:
        held.append(f"{receipt_keys} has other keys of receipts")
    if settings.usage_journal_dir.is_dir() and any(settings.usage_journal_dir.iterdir()):
        held.append(f"{settings.usage_journal_dir} has usage rows")
    mark = await store.read_mark(MARK_KEY)
    is_own_store = mark is not None and mark.decode("ascii", "replace").strip() == manifest.store_mark
    if mark is not None and not (is_own_store and not manifest.has_objects):
        held.append(f"{store.name} is in use")
    if held and not overwrite:
        raise BackupError(
            f"the target is not empty: {'; '.join(held)}. Choose an empty --data-dir, database and object store, or "
            "replace their contents with --overwrite"
        )


def _receipt_keys(folder: Path) -> bytes | None:
    """Return the backup's keys of receipts; None if it has none."""
    file = folder / SECRETS / RECEIPT_KEYS
    return file.read_bytes() if file.exists() else None


async def _load_postgres(folder: Path, manifest: BackupManifest, url: str, migrations: Migrations) -> None:
    """Load the tables at the backup's revision, then migrate them to this release's."""
    head = await asyncio.to_thread(migrations.upgrade, url)
    if head != manifest.revision:
        database = Database.open(url, pool=MAINTENANCE)
        try:
            if await holds_data(database):
                raise BackupError(
                    f"the backup is of revision {manifest.revision}, and the database has data of {head}; restore to "
                    "an empty database"
                )
        finally:
            await database.close()
        await asyncio.to_thread(migrations.downgrade, url, manifest.revision)
    database = Database.open(url, pool=MAINTENANCE)
    try:
        async with database.write() as session:
            await load_copies(session, folder, manifest.tables)
    finally:
        await database.close()
    await asyncio.to_thread(migrations.upgrade, url)


def _write_files(folder: Path, settings: GatewaySettings, peppers: list[bytes]) -> int:
    """Write the peppers, the keys of the first start and of receipts, and the usage journal.

    Return the number of the journal's files.
    """
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if settings.key_pepper is None:
        for name, pepper in zip((FILE_NAME, PREVIOUS_FILE_NAME), peppers, strict=False):
            write_private(settings.data_dir / name, pepper + b"\n")
        if len(peppers) == 1:
            (settings.data_dir / PREVIOUS_FILE_NAME).unlink(missing_ok=True)
    keys = folder / SECRETS / FIRST_KEYS
    if keys.exists():
        write_private(settings.data_dir / FIRST_KEYS, keys.read_bytes())
    kept, receipt_keys = _receipt_keys(folder), key_file_of(settings.receipt_key_file, settings.data_dir)
    if kept is not None and not (receipt_keys.exists() and receipt_keys.read_bytes() == kept):
        receipt_keys.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(receipt_keys, kept)
    shutil.rmtree(settings.usage_journal_dir, ignore_errors=True)
    settings.usage_journal_dir.mkdir(mode=0o700, parents=True)
    files = [path for path in sorted((folder / JOURNAL).glob("*")) if path.stat().st_size]
    for path in files:
        write_private(settings.usage_journal_dir / path.name, path.read_bytes())
    return len(files)


async def _verify(
    manifest: BackupManifest, settings: GatewaySettings, store: ObjectStore, peppers: list[bytes], num_journal: int
) -> RestoreReport:
    problems = []
    database = Database.open(settings.store_url, pool=MAINTENANCE)
    try:
        async with database.read() as session:
            await take_snapshot_locks(session)
            problems += await _wrong_counts(session, manifest)
            now = datetime.now(UTC)
            books = await reconcile(session, FIRST_USAGE, now + timedelta(hours=1))
            problems += await _unusable_keys(session, peppers, now)
            receipts = await verify_stored_chains(session)
        if not books.agrees:
            problems.append("requests, ledger and sums do not agree; see: moiety usage reconcile")
        audit = await verify_stored_chain(database)
    finally:
        await database.close()
    if not audit.intact:
        problems.append(f"the audit log was tampered with: {audit.complaint}")
    problems += receipts.complaints
    receipt_key = _signing_key(settings, problems)
    keys = await stored_keys(store)
    missing = [one.key for one in manifest.objects if one.key not in keys]
    if missing:
        problems.append(f"{len(missing)} stored objects are missing, such as {missing[0]}")
    return RestoreReport(
        created_at=manifest.created_at,
        release=manifest.release,
        tables=len(manifest.tables),
        rows=sum(one.rows for one in manifest.tables),
        requests=books.total.requests,
        audit_entries=audit.num_entries,
        audit_head=f"{audit.num_entries}:{audit.head}",
        objects=len(manifest.objects) - len(missing),
        journal_files=num_journal,
        receipts=receipts.num_receipts,
        receipt_key=receipt_key,
        problems=problems,
        notices=_notices_of_receipts(manifest.created_at, receipts, receipt_key),
    )


def _signing_key(settings: GatewaySettings, problems: list[str]) -> str | None:
    """Return the id of the key that will sign receipts; None if there is none, or none that can be used."""
    file = key_file_of(settings.receipt_key_file, settings.data_dir)
    try:
        return load_signer(file).key_id if file.exists() else None
    except BadReceiptKey as exc:
        problems.append(str(exc))
        return None


def _notices_of_receipts(created_at: datetime, receipts: StoredChains, receipt_key: str | None) -> list[str]:
    """Return what the operator and the tenants must know about the chains of receipts, which continue."""
    if not receipts.num_receipts:
        return []
    notices = [
        f"the chains of receipts ({receipts.num_chains}, one for each tenant) continue after the newest receipt of "
        f"each in the backup. Receipts that were issued after {created_at.isoformat(timespec='seconds')} are not in "
        "it, and their numbers are given again: tell the tenants to verify the receipts that they have from then apart "
        "from later ones"
    ]
    if receipt_key is None:
        notices.append(
            "the backup has no private key of receipts. The next start of a gateway makes a new one, whose signatures "
            "verify with /v1/receipts/keys; to sign with the previous key, restore its file as receipt_key_file before"
        )
    return notices


async def _wrong_counts(session: AsyncSession, manifest: BackupManifest) -> list[str]:
    """Return the tables whose number of rows differs from the manifest's."""
    if await session.scalar(text("SELECT version_num FROM alembic_version")) != manifest.revision:
        return []  # a migration may have added or moved rows
    found = {one.name: one.rows for one in await count_rows(session, backed_up_tables())}
    return [
        f"the table {one.name} has {found.get(one.name)} rows, and {one.rows} in the backup"
        for one in manifest.tables
        if found.get(one.name) != one.rows
    ]


async def _unusable_keys(session: AsyncSession, peppers: list[bytes], now: datetime) -> list[str]:
    working = ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now)
    found = (await session.scalars(select(ApiKey.pepper_mark).where(*working))).all()
    marks = {mark_of(one) for one in peppers}
    lost = sum(mark is not None and mark not in marks for mark in found)
    return [f"{lost} keys were made with another pepper than those of the backup"] if lost else []
