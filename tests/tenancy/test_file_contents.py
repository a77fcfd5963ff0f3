"""Contents of files and adapters: moved from SQL of an earlier version, erased with their rows, not orphaned."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import func, select, update

from moiety_migrations import downgrade, upgrade
from moiety_platform.adapters.contents import AdapterContents
from moiety_platform.adapters.models import Adapter, AdapterChunk
from moiety_platform.batches.models import BatchLine, LineState
from moiety_platform.batches.results import BatchFiles
from moiety_platform.db.session import Database
from moiety_platform.db.url import to_sync_url
from moiety_platform.errors import Gone, NotFound, Unavailable
from moiety_platform.files.contents import FileContents
from moiety_platform.files.models import FileChunk, FileState, StoredFile
from moiety_platform.files.store import begin_file, discard_upload, publish_file
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.retention.orphans import OrphanedObjects

from .conftest import opened_database
from .test_batch_store import OWNER
from .test_retention import StoreClock, batch_of, file_of, lines_of

CHUNK = 256 * 1024
CONTENT = os.urandom(3 * CHUNK + 17)
FILE_COLUMNS = "id, tenant_id, project_id, purpose, filename, state, num_bytes, created_ms, touched_ms"
ADAPTER_COLUMNS = "id, tenant_id, model, name, state, config, num_bytes, digest, created_ms, touched_ms"


@pytest.fixture
def contents(database: Database, objects: ObjectStore) -> FileContents:
    return FileContents(database, objects, BatchFiles(database))


async def read(contents: FileContents, file_id: str) -> bytes:
    async with contents.database.read() as session:
        file = await session.get_one(StoredFile, file_id)
    return b"".join([piece async for piece in contents.read(file)])


async def count(database: Database, table: Any) -> int:
    async with database.read() as session:
        return await session.scalar(select(func.count()).select_from(table)) or 0


async def keys(objects: ObjectStore, prefix: str = "") -> set[str]:
    return {one.key async for page in objects.list_pages(prefix) for one in page}


async def move_all(*movers: FileContents | AdapterContents) -> None:
    for one in movers:
        while await one.move_some():
            pass


@pytest.fixture
async def earlier(database_url: str) -> str:
    """A store as the revision before the object store left it: a file and an adapter in chunks."""
    await asyncio.to_thread(downgrade, database_url, "0023")
    engine = sa.create_engine(to_sync_url(database_url), poolclass=sa.NullPool)
    parts = [(start, CONTENT[start : start + CHUNK]) for start in range(0, len(CONTENT), CHUNK)]
    with engine.begin() as connection:
        connection.execute(
            sa.text(f"INSERT INTO files ({FILE_COLUMNS}) VALUES ('f', 't', 'p', 'batch', 'a', 'ready', :n, 1, 1)"),
            {"n": len(CONTENT)},
        )
        connection.execute(
            sa.text(
                f"INSERT INTO adapters ({ADAPTER_COLUMNS}) VALUES ('a', 't', 'm', 'n', 'ready', '{{}}', :n, 'd', 1, 1)"
            ),
            {"n": len(CONTENT)},
        )
        for start, data in parts:
            values = {"start": start, "stop": start + len(data), "data": data}
            connection.execute(
                sa.text("INSERT INTO file_chunks (file_id, start, stop, data) VALUES ('f', :start, :stop, :data)"),
                values,
            )
            connection.execute(
                sa.text("INSERT INTO adapter_chunks (adapter_id, start, data) VALUES ('a', :start, :data)"), values
            )
    await asyncio.to_thread(upgrade, database_url)
    return database_url


@pytest.fixture
async def upgraded(earlier: str) -> AsyncIterator[Database]:
    async with opened_database(earlier) as opened:
        yield opened


async def test_contents_of_an_earlier_version_are_served_before_and_after_they_have_moved(
    upgraded: Database, objects: ObjectStore
) -> None:
    files, adapters = FileContents(upgraded, objects, BatchFiles(upgraded)), AdapterContents(upgraded, objects)
    for is_moved in (False, True):
        assert await read(files, "f") == CONTENT
        parts = [part async for part in adapters.parts("a")]
        assert b"".join(part.data for part in parts) == CONTENT
        assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
        assert (await keys(objects) != set()) is is_moved
        await move_all(files, adapters)
    assert [await count(upgraded, table) for table in (FileChunk, AdapterChunk)] == [0, 0]
    async with upgraded.read() as session:
        file = await session.get_one(StoredFile, "f")
        assert (file.digest, file.object_key) == (hashlib.sha256(CONTENT).hexdigest(), "files/t/f")


async def test_a_move_that_is_cut_off_at_any_point_is_ended_by_the_next(
    upgraded: Database, objects: ObjectStore
) -> None:
    files, adapters = FileContents(upgraded, objects, BatchFiles(upgraded)), AdapterContents(upgraded, objects)
    for moment_s in (0.0, 0.005, 0.01, 0.02, 0.04, 0.08):
        for mover in (files, adapters):
            task = asyncio.create_task(mover.move_some())
            await asyncio.sleep(moment_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for _ in range(20):  # a cut off transaction may keep SQLite's lock for a moment
                try:
                    assert await read(files, "f") == CONTENT
                    break
                except Unavailable:
                    await asyncio.sleep(0.05)
    await asyncio.gather(move_all(files, adapters), move_all(FileContents(upgraded, objects, BatchFiles(upgraded))))
    assert await read(files, "f") == CONTENT
    assert b"".join([part.data async for part in adapters.parts("a")]) == CONTENT
    assert [await count(upgraded, table) for table in (FileChunk, AdapterChunk)] == [0, 0]


async def test_a_reader_goes_on_in_the_object_while_its_file_moves(upgraded: Database, objects: ObjectStore) -> None:
    files = FileContents(upgraded, objects, BatchFiles(upgraded))
    async with upgraded.read() as session:
        file = await session.get_one(StoredFile, "f")
    pieces = files.read(file)
    first = await anext(pieces)
    await move_all(files)
    assert first + b"".join([piece async for piece in pieces]) == CONTENT


async def test_results_of_a_batch_move_and_their_answers_go_but_the_lines_stay(
    database: Database, objects: ObjectStore, contents: FileContents
) -> None:
    async with database.write() as session:
        session.add_all([batch_of("b", 1), *lines_of("b", 3, b"{}")])
        session.add(file_of("out", 1, batch_id="b", line_state=LineState.COMPLETED))
        await session.flush()
        whole = b"{}\n" * 3
        await session.execute(update(StoredFile).values(num_bytes=len(whole)))
    assert await read(contents, "out") == whole
    await move_all(contents)
    assert await read(contents, "out") == whole
    async with database.read() as session:
        assert set(await session.scalars(select(BatchLine.answer))) == {None}
    assert await keys(objects) == {"files/t/out"}


async def test_a_content_that_lacks_a_part_is_not_moved_and_holds_up_no_other(
    upgraded: Database, objects: ObjectStore
) -> None:
    async with upgraded.write() as session:
        session.add(file_of("broken", 1))
    files = FileContents(upgraded, objects, BatchFiles(upgraded))
    await move_all(files)
    assert await keys(objects) == {"files/t/f"}
    with pytest.raises(Gone):
        await read(files, "broken")


async def test_no_transaction_is_open_and_nothing_is_lost_while_the_object_store_is_away(
    upgraded: Database, objects: ObjectStore
) -> None:
    files = FileContents(upgraded, objects, BatchFiles(upgraded))

    async def refuse() -> None:
        async with upgraded.write() as session:  # on SQLite it would wait for another one
            await session.execute(update(StoredFile).values(touched_ms=StoredFile.touched_ms))
        raise Unavailable("away", code="object_store_unavailable")

    objects.guard = refuse
    with pytest.raises(Unavailable):
        await files.move_some()
    assert await read(files, "f") == CONTENT
    objects.guard = None
    await move_all(files)
    async with upgraded.write() as session:
        await session.execute(update(StoredFile).values(state=FileState.DELETED))
    objects.guard = refuse
    with pytest.raises(Unavailable):
        await files.purge()
    assert await count(upgraded, StoredFile) == 1
    objects.guard = None
    assert [await files.purge(), await files.purge()] == [1, 0]
    assert (await keys(objects), await count(upgraded, StoredFile)) == (set(), 0)


async def upload(contents: FileContents, *, is_finished: bool = True) -> StoredFile:
    """What an upload has done when it is killed before it is published."""
    async with contents.database.write() as session:
        file = await begin_file(session, OWNER, "in.jsonl")
        file.num_bytes = 3
    assert file.object_key is not None
    writer = contents.objects.begin_object(file.object_key)
    await writer.write(b"{}\n")
    if is_finished:
        await writer.finish()
    return file


async def test_objects_without_a_row_after_a_kill_are_erased_later(database: Database, objects: ObjectStore) -> None:
    now = StoreClock()
    contents = FileContents(database, objects, BatchFiles(database), now)
    for is_finished in (True, False):
        await upload(contents, is_finished=is_finished)
    assert await contents.purge() == 0, "it may still go on"
    now.ahead_s = 3601
    assert [await contents.purge() for _ in range(3)] == [1, 1, 0]
    assert (await keys(objects), await count(database, StoredFile)) == (set(), 0)


async def test_an_object_that_no_row_refers_to_goes_after_its_grace_and_no_other(
    database: Database, objects: ObjectStore, contents: FileContents, tmp_path: Path
) -> None:
    kept, discarded, lost = [await upload(contents) for _ in range(3)]
    async with database.write() as session:
        await publish_file(session, kept.id, "batch", "digest", None)
        assert await discard_upload(session, discarded.id)
        assert not await discard_upload(session, kept.id), "it is published"
        await session.execute(sa.delete(StoredFile).where(StoredFile.id == lost.id))
    before = await keys(objects)
    await OrphanedObjects(database, objects).delete()
    assert await keys(objects) == before, "it may be that of an upload that has just ended"
    old = (datetime.now(UTC) - timedelta(hours=25)).timestamp()
    for path in (tmp_path / "objects").rglob("file*"):
        os.utime(path, (old, old))
    await OrphanedObjects(database, objects).delete()
    assert await keys(objects) == before - {lost.object_key}
    assert await read(contents, kept.id) == b"{}\n"


async def test_a_file_whose_object_is_lost_is_told_as_gone(
    database: Database, objects: ObjectStore, contents: FileContents
) -> None:
    file = await upload(contents)
    assert file.object_key is not None
    await objects.delete(file.object_key)
    with pytest.raises(Gone, match="upload the file again"):
        await read(contents, file.id)
    with pytest.raises(Gone):
        await contents.read_range(*(await contents.locate(file.id))[:1], 0, 3)
    async with database.write() as session:
        await session.execute(sa.insert(Adapter).values(
            id="ada", tenant_id="t", model="m", name="n", state="ready", config="", num_bytes=3, created_ms=1,
            touched_ms=1, object_key="adapters/t/ada/0",
        ))  # fmt: skip
    with pytest.raises(NotFound):
        [part async for part in AdapterContents(database, objects).parts("ada")]
