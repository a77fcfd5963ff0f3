"""Folder of a backup: its manifest, and the checksums of all its files.

manifest.json     what the backup holds, and the versions that made it
SHA256SUMS        checksums of all other files, which `sha256sum -c SHA256SUMS` verifies too
database.sqlite   a SQLite database; of PostgreSQL instead database/TABLE.copy, text of COPY
secrets/          the peppers, newest first, the keys of the first start, and those that sign receipts
usage-journal/    usage rows that were not in the database yet
objects/          contents of files and adapters
"""

from __future__ import annotations

import hashlib
import os
from datetime import datetime
from pathlib import Path, PurePosixPath

import msgspec

from moiety_platform.backups.errors import BackupError

FORMAT = 1
MANIFEST, CHECKSUMS = "manifest.json", "SHA256SUMS"
SQLITE_FILE, TABLES = "database.sqlite", "database"
SECRETS, JOURNAL, OBJECTS = "secrets", "usage-journal", "objects"
PEPPERS = "pepper-{}"  # the number counts from 1, for the newest
FIRST_KEYS = "keys.json"
RECEIPT_KEYS = "receipts.pem"
PIECE_BYTES = 1024 * 1024


class TableCopy(msgspec.Struct, frozen=True):
    """A table of the database: its number of rows, and its columns in the order of a COPY."""

    name: str
    columns: list[str]
    rows: int


class ObjectCopy(msgspec.Struct, frozen=True):
    """A stored object that a row of the backup refers to. `digest` is its SHA-256, where the row has one."""

    key: str
    num_bytes: int
    digest: str | None


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a backup. `tables` are ordered so that a table follows those that it refers to.

    `has_objects` says whether the contents of `objects` are in the backup; otherwise they are only in `object_store`.
    `lost_objects` are those that the object store did not hold, or held with another content.
    """

    format: int
    release: str
    created_at: datetime
    dialect: str
    revision: str
    tables: list[TableCopy]
    object_store: str
    store_mark: str | None
    has_objects: bool
    objects: list[ObjectCopy]
    lost_objects: list[str]


def write_archive_index(folder: Path, manifest: BackupManifest) -> None:
    """Write the manifest, then the checksums, and force all files to the disk. Raises OSError."""
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    lines = [f"{digest_of(path)}  {name}\n" for name, path in _files(folder) if name != CHECKSUMS]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
    for _, path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_archive(folder: Path) -> BackupManifest:
    """Check the version and all checksums of a backup; return its manifest. Raises BackupError."""
    if not (folder / MANIFEST).is_file() or not (folder / CHECKSUMS).is_file():
        raise BackupError(f"{folder} is no complete backup: it lacks {MANIFEST} or {CHECKSUMS}")
    try:
        version = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=dict)["format"]
        if version != FORMAT:
            raise BackupError(f"{folder} has the format {version}, this release reads {FORMAT}: use a newer release")
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=BackupManifest)
        expected = dict(_parse_line(line) for line in (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines())
    except (msgspec.MsgspecError, ValueError, KeyError) as exc:
        raise BackupError(f"{folder} is damaged: {exc}; use another copy of the backup") from exc
    found = {name: path for name, path in _files(folder) if name != CHECKSUMS}
    wrong = sorted({*expected} ^ {*found}) + [
        name for name, path in found.items() if name in expected and digest_of(path) != expected[name]
    ]
    if wrong:
        raise BackupError(
            f"{folder} is damaged: {len(wrong)} files are missing, unlisted or changed, such as {wrong[0]}; use "
            "another copy of the backup"
        )
    for one in manifest.objects:
        object_path(folder, one.key)
    return manifest


def object_path(folder: Path, key: str) -> Path:
    """Return the path of an object in a backup. Raises BackupError for a key that leaves the folder."""
    parts = PurePosixPath(key).parts
    if not parts or key.startswith("/") or ".." in parts:
        raise BackupError(f"the backup names an object {key!r}, which is no valid key; use another copy of the backup")
    return folder.joinpath(OBJECTS, *parts)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[tuple[str, Path]]:
    return sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())


def _parse_line(line: str) -> tuple[str, str]:
    digest, _, name = line.partition("  ")
    if not name:
        raise ValueError(f"{CHECKSUMS} has a line that is no checksum")
    return name, digest
