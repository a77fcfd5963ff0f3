"""A folder and an S3 server behave alike as object stores, and each failure has its own error."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.s3_server import S3Server

from moiety_migrations import upgrade
from moiety_platform.db.session import Database
from moiety_platform.errors import InsufficientStorage, Unavailable
from moiety_platform.object_storage.readiness import MARK_KEY, ObjectStoreReadiness
from moiety_platform.object_storage.store import PART_BYTES, PIECE_BYTES, ObjectMissing, ObjectStore
from moiety_platform.object_store_url import check_url

CONTENT = os.urandom(2 * PART_BYTES + 12_345)  # several parts of an upload


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture(params=["folder", "s3"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ObjectStore]:
    url = (tmp_path / "objects").as_uri()
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = f"{server.url}/{tmp_path.name}"
    opened = ObjectStore.open(url)
    yield opened
    await opened.close()


async def put(store: ObjectStore, key: str, content: bytes = b"content") -> None:
    writer = store.begin_object(key)
    for start in range(0, len(content), PIECE_BYTES):
        await writer.write(content[start : start + PIECE_BYTES])
    await writer.finish()


async def keys(store: ObjectStore, prefix: str = "files/") -> set[str]:
    return {one.key async for page in store.list_pages(prefix) for one in page}


async def test_an_object_comes_out_as_it_went_in_and_exists_only_once_it_is_finished(store: ObjectStore) -> None:
    writer = store.begin_object("files/t/a")
    for start in range(0, len(CONTENT), PIECE_BYTES):
        await writer.write(CONTENT[start : start + PIECE_BYTES])
    assert await keys(store) == set()
    written = await writer.finish()
    assert (written.num_bytes, written.digest) == (len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    ranges = [await store.read_range("files/t/a", start, PIECE_BYTES) for start in range(0, len(CONTENT), PIECE_BYTES)]
    assert b"".join(ranges) == CONTENT
    assert await store.read_range("files/t/a", 7, 3) == CONTENT[7:10]


async def test_an_object_that_is_given_up_leaves_none_and_the_former_one_stays(store: ObjectStore) -> None:
    await put(store, "files/t/a", b"former")
    writer = store.begin_object("files/t/a")
    await writer.write(CONTENT)
    assert not writer.abort()
    assert await keys(store) == {"files/t/a"}
    assert await store.read_range("files/t/a", 0, 100) == b"former"


async def test_objects_are_listed_by_prefix_and_deleted_once(store: ObjectStore) -> None:
    before = datetime.now(UTC) - timedelta(seconds=60)
    for key in ("files/t/a", "files/t/b", "files/tt/c", "adapters/t/d/1"):
        await put(store, key)
    assert await keys(store) == {"files/t/a", "files/t/b", "files/tt/c"}
    (page,) = [page async for page in store.list_pages("adapters/")]
    assert page[0].modified_at > before
    assert await store.delete_some("files/t/") == 2
    assert await store.delete_some("files/t/") == 0
    await store.delete("files/tt/c")
    await store.delete("files/tt/c")
    assert await keys(store) == set()
    with pytest.raises(ObjectMissing):
        await store.read_range("files/tt/c", 0, 1)


async def test_only_the_first_mark_counts(store: ObjectStore) -> None:
    assert await store.read_mark("mark") is None
    await store.create_mark("mark", b"first")
    await store.create_mark("mark", b"second")
    assert await store.read_mark("mark") == b"first"


async def test_an_unreachable_object_store_is_reported_and_used_again_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store = ObjectStore.open(server.url)
        server.stop()
        for operation in (store.read_range("a", 0, 1), put(store, "a"), store.delete("a"), keys(store)):
            with pytest.raises(Unavailable) as caught:
                await operation
            assert (caught.value.code, caught.value.retry_after_s) == ("object_store_unavailable", 1)
        server.start()
        await put(store, "files/t/a")
        assert await keys(store) == {"files/t/a"}
        await store.close()


async def test_a_full_disk_is_reported_and_leaves_no_object(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:  # noqa: ASYNC221
        pytest.skip("only root can mount a small file system")
    try:
        store = ObjectStore.open(tmp_path.as_uri())
        await put(store, "files/t/small")
        writer = store.begin_object("files/t/large")
        try:
            await writer.write(CONTENT)
            await writer.finish()
        except InsufficientStorage as error:
            told = error.status, error.code
        assert told == (507, "object_store_full")
        writer.abort()
        assert await keys(store) == {"files/t/small"}
        await put(store, "files/t/other", b"x" * PIECE_BYTES)  # what was written of the large one is free again
        await store.close()
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)  # noqa: ASYNC221


KILLED = """
import asyncio, os, signal, sys
from moiety_platform.object_storage.store import PART_BYTES, ObjectStore

async def main():
    writer = ObjectStore.open(sys.argv[1]).begin_object("files/t/killed")
    await writer.write(bytes(2 * PART_BYTES))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_unfinished_files_of_a_killed_process_are_not_objects_and_are_removed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, tmp_path.as_uri()]
    assert subprocess.run(command, env=environment, check=False).returncode == -9  # noqa: ASYNC221
    store = ObjectStore.open(tmp_path.as_uri())
    await put(store, "files/t/kept")
    assert await keys(store) == {"files/t/kept"}
    now = datetime.now(UTC)
    assert await store.remove_unfinished(before=now - timedelta(hours=1)) == 0, "it may still be written"
    assert await store.remove_unfinished("files/tt/") == 0
    assert await store.remove_unfinished(before=now + timedelta(hours=1)) == 1
    assert [path.name for path in (tmp_path / "files" / "t").iterdir()] == ["kept"]
    await store.close()


async def test_a_store_is_that_of_one_database_and_no_other(
    database: Database, store: ObjectStore, tmp_path: Path
) -> None:
    first, second = ObjectStoreReadiness(database, store), ObjectStoreReadiness(database, store)
    assert [await first.why_not_ready(), await second.why_not_ready()] == ["", ""]
    await put(store, "files/t/a")
    await asyncio.to_thread(upgrade, f"sqlite:///{tmp_path / 'other.db'}")
    other = Database.open(f"sqlite:///{tmp_path / 'other.db'}")
    assert "belongs to another database" in await ObjectStoreReadiness(other, store).why_not_ready()
    with pytest.raises(Unavailable):
        await store.delete("files/t/a")
    await other.close()


async def test_a_folder_that_gateways_do_not_share_is_refused_with_what_to_do(
    database: Database, objects: ObjectStore, tmp_path: Path
) -> None:
    elsewhere = ObjectStore.open((tmp_path / "elsewhere").as_uri())
    checks = [ObjectStoreReadiness(database, one) for one in (objects, elsewhere)]
    reasons = await asyncio.gather(*(check.why_not_ready() for check in checks))
    (refused,) = [reason for reason in reasons if reason]
    assert "mount the folder that all gateways share, or set object_store_url to their bucket" in refused
    away = elsewhere if reasons[1] else objects
    for operation in (put(away, "files/t/a"), away.delete("files/t/a"), keys(away)):
        with pytest.raises(Unavailable):
            await operation
    mark = refused.partition("write ")[2].partition(" into")[0]
    (tmp_path / ("elsewhere" if reasons[1] else "objects") / MARK_KEY).write_text(f"{mark}\n")
    await put(away, "files/t/a")
    await elsewhere.close()


async def test_a_missing_bucket_is_reported_and_fails_every_write(
    database: Database, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore.open("s3://nowhere/moiety")
    with pytest.raises(Unavailable):
        await put(store, "files/t/a")
    assert "404 Not Found" in await ObjectStoreReadiness(database, store).why_not_ready()
    await store.close()


async def test_a_folder_that_cannot_be_created_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="check object_store_url"):
        ObjectStore.open((tmp_path / "file" / "objects").as_uri())


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("/var/objects", "must begin with"),
        ("ftp://host/a", "must begin with"),
        ("file://objects", "absolute folder"),
        ("s3:///prefix", "must name a bucket"),
        ("s3://key:secret@bucket", "no credentials"),
        ("gs://bucket?endpoint=x", "no options"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_secrets(url: str, word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        check_url(url)
    assert "secret" not in str(caught.value)
