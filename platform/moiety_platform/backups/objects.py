"""Copies of stored objects: contents of files and adapters, in a folder or a bucket."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.adapters.models import Adapter
from moiety_platform.backups.archive import PIECE_BYTES, ObjectCopy, object_path
from moiety_platform.backups.errors import BackupError
from moiety_platform.files.models import FileState, StoredFile
from moiety_platform.object_storage.keys import KINDS
from moiety_platform.object_storage.readiness import MARK_KEY
from moiety_platform.object_storage.store import ObjectMissing, ObjectStore


async def referenced_objects(session: AsyncSession) -> list[ObjectCopy]:
    """Return the objects that rows of the database refer to, by their keys."""
    files = select(StoredFile.object_key, StoredFile.num_bytes, StoredFile.digest).where(
        StoredFile.object_key.is_not(None), StoredFile.state == FileState.READY
    )
    adapters = select(Adapter.object_key, Adapter.num_bytes, Adapter.digest).where(Adapter.object_key.is_not(None))
    rows = [*(await session.execute(files)), *(await session.execute(adapters))]
    return sorted((ObjectCopy(key, size, digest) for key, size, digest in rows), key=lambda one: one.key)


async def save_objects(store: ObjectStore, objects: Iterable[ObjectCopy], folder: Path) -> list[str]:
    """Copy objects to a backup; return the keys of those that are missing or differ from their rows' checksums.

    An object that was deleted after the database was read is missing. Raises Unavailable or OSError.
    """
    lost = []
    for one in objects:
        path = object_path(folder, one.key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest = hashlib.sha256()
        try:
            with path.open("wb") as file:
                async for piece in _pieces(store, one):
                    file.write(piece)
                    digest.update(piece)
        except ObjectMissing:
            path.unlink()
            lost.append(one.key)
            continue
        if one.digest is not None and digest.hexdigest() != one.digest:
            lost.append(one.key)
    return lost


async def put_objects(store: ObjectStore, objects: Iterable[ObjectCopy], folder: Path) -> None:
    """Write the objects of a backup to a store. Raises Unavailable, InsufficientStorage or BackupError."""
    for one in objects:
        path = object_path(folder, one.key)
        if not path.is_file():
            continue  # it was lost before the backup, whose manifest says so
        writer = store.begin_object(one.key)
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                await writer.write(piece)
        written = await writer.finish()
        if written.num_bytes != path.stat().st_size:
            raise BackupError(f"{store.name} took only a part of the object {one.key}; check its free space")


async def put_mark(store: ObjectStore, mark: str) -> None:
    """Write the mark that binds the store to the database."""
    writer = store.begin_object(MARK_KEY)
    await writer.write(mark.encode("ascii"))
    await writer.finish()


async def stored_keys(store: ObjectStore) -> set[str]:
    """Return the keys of all objects of the store. Raises Unavailable."""
    return {one.key for kind in KINDS async for page in store.list_pages(kind) for one in page}


async def _pieces(store: ObjectStore, one: ObjectCopy) -> AsyncIterator[bytes]:
    """Yield the content of an object. Raises ObjectMissing."""
    start = 0
    while True:
        try:
            piece = await store.read_range(one.key, start, PIECE_BYTES)
        except ObjectMissing:
            if start == 0 and one.num_bytes:
                raise
            return  # the last piece ended with the object
        yield piece
        start += len(piece)
        if len(piece) < PIECE_BYTES:
            return
