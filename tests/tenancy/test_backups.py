"""Backup and restore of both databases: the restored state is that of one moment, and anything else is refused."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import func, select
from tests.s3_server import S3Server

from moiety_migrations import HEAD, downgrade, upgrade
from moiety_platform.audit.models import AuditEntry
from moiety_platform.auth.keys import hash_key, parse_key
from moiety_platform.backups.archive import CHECKSUMS, MANIFEST, OBJECTS, SECRETS, read_archive
from moiety_platform.backups.backup import create_backup
from moiety_platform.backups.errors import BackupError
from moiety_platform.backups.restore import Migrations, restore_backup
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.receipts.signing import load_signer
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenants.models import ApiKey
from moiety_platform.usage.models import UsageRecord

from .deployments import CONTENT, PEPPER, Deployment, backed_up, restored, why_not_ready


async def test_a_backup_made_while_requests_run_is_restored_whole(
    deployment: Deployment, new_settings: Callable[[str], GatewaySettings], tmp_path: Path
) -> None:
    done = asyncio.Event()

    async def serve() -> int:
        num = 0
        async with deployment.database() as database:
            while not done.is_set():
                await deployment.add_requests(database, 1)
                num += 1
        return num

    serving = asyncio.create_task(serve())
    async with deployment.database() as database:
        while True:  # until requests run
            async with database.read() as session:
                if (await session.scalar(select(func.count()).select_from(UsageRecord)) or 0) > 3:
                    break
    folder = await backed_up(deployment, tmp_path)
    done.set()
    num_served = await serving
    target = new_settings("second")
    report = await restored(folder, target)
    assert report.problems == []
    assert 3 < report.requests <= 3 + num_served
    assert (report.audit_entries, report.objects) == (3, 1)
    copy = Deployment(target)
    async with copy.database() as database, database.read() as session:
        key = await session.get(ApiKey, deployment.key_id)
        text = parse_key(deployment.key)
        assert key is not None
        assert text is not None
        pepper = (target.data_dir / "pepper").read_bytes().strip()
        assert key.secret_hash == hash_key(text, pepper)
    objects = ObjectStore.open(target.objects_url)
    assert await objects.read_range(deployment.object_key, 0, 10_000) == CONTENT
    await objects.close()
    async with copy.database() as database:
        checked = ObjectStore.open(target.objects_url)
        assert await why_not_ready(database, checked) == ""
        await checked.close()


async def test_every_file_of_a_backup_is_private_and_has_a_checksum(deployment: Deployment, tmp_path: Path) -> None:
    folder = await backed_up(deployment, tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert (folder / SECRETS / "pepper-1").read_text() == PEPPER + "\n"
    lines = (folder / CHECKSUMS).read_text().splitlines()
    assert {line.partition("  ")[2] for line in lines} == {
        path.relative_to(folder).as_posix() for path in files if path.name != CHECKSUMS
    }
    command = ("sha256sum", "--check", "--strict", "--quiet", CHECKSUMS)
    checking = await asyncio.create_subprocess_exec(*command, cwd=folder)
    assert await checking.wait() == 0
    assert names_in(tmp_path) == sorted(["first", folder.name])


async def test_a_damaged_or_newer_backup_is_refused_before_anything_is_changed(
    deployment: Deployment, new_settings: Callable[[str], GatewaySettings], tmp_path: Path
) -> None:
    target = new_settings("second")

    async def refused(folder: Path) -> str:
        with pytest.raises(BackupError) as raised:
            await restored(folder, target)
        assert not target.data_dir.exists()
        return str(raised.value)

    flipped = await backed_up(deployment, tmp_path)
    content = flipped / OBJECTS / deployment.object_key
    content.write_bytes(content.read_bytes().replace(b"one", b"two"))
    assert "is damaged: 1 files are missing, unlisted or changed" in await refused(flipped)
    for path in (MANIFEST, f"{SECRETS}/pepper-1"):
        lacking = await backed_up(deployment, tmp_path)
        (lacking / path).unlink()
        assert "backup" in await refused(lacking)
    more = await backed_up(deployment, tmp_path)
    (more / SECRETS / "pepper-2").write_text("another")
    assert "unlisted" in await refused(more)
    newer = await backed_up(deployment, tmp_path)
    manifest = json.loads((newer / MANIFEST).read_text())
    (newer / MANIFEST).write_text(json.dumps(manifest | {"format": 2}))
    assert "has the format 2, this release reads 1" in await refused(newer)


async def test_a_target_that_is_not_empty_is_only_replaced_when_told(
    deployment: Deployment, new_settings: Callable[[str], GatewaySettings], tmp_path: Path
) -> None:
    folder = await backed_up(deployment, tmp_path)
    other = Deployment(new_settings("second"))
    await other.fill()
    async with other.database() as database:
        await other.add_requests(database, 4)
    with pytest.raises(BackupError, match="the target is not empty: the database has tenants or keys") as raised:
        await restored(folder, other.settings)
    assert "pepper" in str(raised.value)
    async with other.database() as database, database.read() as session:
        assert await session.scalar(select(func.count()).select_from(UsageRecord)) == 7
    report = await restored(folder, other.settings, overwrite=True)
    assert (report.problems, report.requests) == ([], 3)
    async with other.database() as database, database.read() as session:
        assert await session.get(ApiKey, other.key_id) is None
        assert await session.get(ApiKey, deployment.key_id) is not None


async def test_books_and_an_audit_log_that_do_not_agree_are_reported(
    deployment: Deployment, new_settings: Callable[[str], GatewaySettings], tmp_path: Path
) -> None:
    async with deployment.database() as database, database.write() as session:
        record = (await session.scalars(select(UsageRecord).limit(1))).one()
        record.output_tokens += 1
        entry = (await session.scalars(select(AuditEntry).order_by(AuditEntry.seq).limit(1))).one()
        entry.actor = "somebody else"
    report = await restored(await backed_up(deployment, tmp_path), new_settings("second"))
    ledger, audit = report.problems
    assert "requests, ledger and sums do not agree" in ledger
    assert "the audit log was tampered with" in audit


async def test_an_object_that_the_store_has_lost_is_named(
    deployment: Deployment, new_settings: Callable[[str], GatewaySettings], tmp_path: Path
) -> None:
    (deployment.settings.data_dir / "objects" / deployment.object_key).unlink()
    folder = await backed_up(deployment, tmp_path)
    assert read_archive(folder).lost_objects == [deployment.object_key]
    report = await restored(folder, new_settings("second"))
    assert report.problems == [f"1 stored objects are missing, such as {deployment.object_key}"]


async def test_a_backup_without_contents_is_restored_beside_its_object_store(
    deployment: Deployment, new_url: Callable[[], str | None], tmp_path: Path
) -> None:
    folder = tmp_path / "no-contents"
    manifest = await create_backup(deployment.settings, folder, "1.0", copy_objects=False)
    assert not (folder / OBJECTS).exists()
    assert [one.key for one in manifest.objects] == [deployment.object_key]
    store = deployment.settings.objects_url
    report = await restored(
        folder, GatewaySettings(data_dir=tmp_path / "second", database_url=new_url(), object_store_url=store)
    )
    assert (report.problems, report.objects) == ([], 1)


async def test_a_backup_moves_a_deployment_from_a_folder_to_a_bucket_and_back(
    deployment: Deployment,
    new_settings: Callable[[str], GatewaySettings],
    new_url: Callable[[], str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        bucket = GatewaySettings(data_dir=tmp_path / "second", database_url=new_url(), object_store_url=server.url)
        report = await restored(await backed_up(deployment, tmp_path), bucket)
        assert (report.problems, report.objects) == ([], 1)
        only_listed = await create_backup(bucket, tmp_path / "listed", "1.0")
        assert (only_listed.has_objects, only_listed.object_store) == (False, server.url)
        assert [one.key for one in only_listed.objects] == [deployment.object_key]
        copied = await create_backup(bucket, tmp_path / "copied", "1.0", copy_objects=True)
        assert (copied.has_objects, copied.lost_objects) == (True, [])
    again = await restored(tmp_path / "copied", new_settings("third"))
    assert (again.problems, again.objects) == ([], 1)


async def test_usage_rows_of_the_journal_are_restored(
    deployment: Deployment, new_settings: Callable[[str], GatewaySettings], tmp_path: Path
) -> None:
    journal = deployment.settings.usage_journal_dir
    journal.mkdir()
    (journal / "1-abc.jsonl").write_text("a row\n")
    (journal / "refused.txt").write_text("a refused row\n")
    (journal / "2-def.jsonl").write_text("")
    target = new_settings("second")
    report = await restored(await backed_up(deployment, tmp_path), target)
    assert report.journal_files == 2
    assert {path.name for path in target.usage_journal_dir.iterdir()} == {"1-abc.jsonl", "refused.txt"}


async def test_a_backup_of_an_earlier_revision_is_migrated(
    deployment: Deployment,
    new_settings: Callable[[str], GatewaySettings],
    new_url: Callable[[], str | None],
    tmp_path: Path,
) -> None:
    folder = await backed_up(deployment, tmp_path)
    assert read_archive(folder).revision == HEAD
    asked: list[str] = []

    def note(url: str, revision: str) -> str:
        asked.append(revision)
        return downgrade(url, revision)

    earlier = "0031"
    manifest = json.loads((folder / MANIFEST).read_text()) | {"revision": earlier}
    url = new_url()
    if url is None:
        downgrade(f"sqlite:///{folder / 'database.sqlite'}", earlier)
        with contextlib.closing(sqlite3.connect(folder / "database.sqlite")) as file:
            file.execute("PRAGMA journal_mode=DELETE")
    else:
        upgrade(url)
        downgrade(url, earlier)
        with contextlib.closing(psycopg.connect(url)) as connection:
            rows = connection.execute("SELECT table_name, column_name FROM information_schema.columns").fetchall()
        assert drop_columns(folder, manifest, {(table, column) for table, column in rows})
    (folder / MANIFEST).write_text(json.dumps(manifest))
    rewrite_checksums(folder)
    target = new_settings("second")
    report = await restore_backup(folder, target, Migrations(upgrade, note))
    assert (report.problems, report.requests) == ([], 3)
    assert asked == ([] if url is None else [earlier])


def drop_columns(folder: Path, manifest: dict[str, Any], kept: set[tuple[str, str]]) -> int:
    """Remove other columns than these from the tables of a backup; return the number of removed columns."""
    num_dropped = 0
    known = {name for name, _ in kept}
    for table in manifest["tables"]:
        if table["name"] not in known:  # of a later revision
            (folder / "database" / f"{table['name']}.copy").unlink()
    manifest["tables"] = [table for table in manifest["tables"] if table["name"] in known]
    for table in manifest["tables"]:
        places = [place for place, name in enumerate(table["columns"]) if (table["name"], name) in kept]
        num_dropped += len(table["columns"]) - len(places)
        table["columns"] = [table["columns"][place] for place in places]
        path = folder / "database" / f"{table['name']}.copy"
        rows = [line.split("\t") for line in path.read_text().split("\n")[:-1]]
        path.write_text("".join("\t".join(row[place] for place in places) + "\n" for row in rows))
    return num_dropped


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / "pepper").unlink(), "there is no pepper"),
        (lambda folder: (folder.parent / "taken" / "x").write_text(""), "exists already"),
    ],
)
async def test_what_cannot_be_backed_up_leaves_nothing_behind(
    deployment: Deployment, tmp_path: Path, spoil: Callable[[Path], object], complaint: str
) -> None:
    (tmp_path / "taken").mkdir()
    spoil(deployment.settings.data_dir)
    with pytest.raises(BackupError, match=complaint):
        await create_backup(deployment.settings, tmp_path / "taken", "1.0")
    assert set(names_in(tmp_path / "taken")) <= {"x"}
    assert names_in(tmp_path) == ["first", "taken"]


async def test_peppers_of_a_rotation_are_restored_in_their_order(
    deployment: Deployment, new_settings: Callable[[str], GatewaySettings], tmp_path: Path
) -> None:
    data_dir = deployment.settings.data_dir
    (data_dir / "pepper").rename(data_dir / "pepper.previous")
    (data_dir / "pepper").write_text("the next pepper of this test\n")
    target = new_settings("second")
    report = await restored(await backed_up(deployment, tmp_path), target)
    assert report.problems == []
    assert (target.data_dir / "pepper").read_text() == "the next pepper of this test\n"
    assert (target.data_dir / "pepper.previous").read_text() == PEPPER + "\n"
    other = target.model_copy(update={"key_pepper": "of another deployment"})
    with pytest.raises(BackupError, match="MOIETY_KEY_PEPPER is not a pepper of this backup"):
        await restored(await backed_up(deployment, tmp_path), GatewaySettings(**{**other.model_dump()}))


async def test_keys_that_sign_receipts_are_restored_and_others_not_replaced_unasked(
    deployment: Deployment, new_settings: Callable[[str], GatewaySettings], tmp_path: Path
) -> None:
    signer, target = load_signer(deployment.settings.data_dir / "receipts.pem"), new_settings("second")
    backup = await backed_up(deployment, tmp_path)
    other = load_signer(target.data_dir / "receipts.pem")
    with pytest.raises(BackupError, match="has other keys of receipts"):
        await restored(backup, target)
    assert load_signer(target.data_dir / "receipts.pem").key_id == other.key_id
    (target.data_dir / "receipts.pem").unlink()
    assert (await restored(backup, target)).problems == []
    assert load_signer(target.data_dir / "receipts.pem").key_id == signer.key_id


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rewrite_checksums(folder: Path) -> None:
    """Write the checksums of a changed backup anew."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    digests = ((hashlib.sha256(path.read_bytes()).hexdigest(), path.relative_to(folder)) for path in files)
    (folder / CHECKSUMS).write_text("".join(f"{digest}  {path}\n" for digest, path in digests))
