"""The object store of one process, by obstore. Knows no database; a guard may be asked before the first use.

obstore's blocking functions run in threads of this module: its asynchronous ones call back into Python from threads
that outlive the event loop, and can abort an interpreter that ends within moments of the last call.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import obstore
import structlog
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, from_url

from moiety_platform.errors import InsufficientStorage, Unavailable
from moiety_platform.object_store_url import local_folder, redacted
from moiety_platform.thread_priority import lower_priority

PIECE_BYTES = 1024 * 1024  # per read of a content: each is a request of its own, however slow its reader is
PART_BYTES = 8 * 1024 * 1024  # of a multipart upload; S3 accepts 5 MiB at least and 10,000 parts
PARTS_AT_ONCE = 2
THREADS = 8
LISTED_AT_ONCE = 500
UNAVAILABLE = "object_store_unavailable"
FULL = "object_store_full"

_CLIENT: Any = {"connect_timeout": "5s", "timeout": "30s", "allow_http": True}  # where an endpoint says http://
_RETRIES: Any = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
_OUT_OF_RANGE = re.compile(r"range .*invalid|InvalidRange|416", re.IGNORECASE)  # the object is shorter
_NO_SPACE = re.compile(rf"\(os error ({errno.ENOSPC}|{errno.EDQUOT})\)")
_UNFINISHED = re.compile(r".+#\d+")  # name of a local file that is being written

T = TypeVar("T")

log = structlog.get_logger(__name__)


class ObjectMissing(Exception):
    """The store has no object with this key."""


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """A complete object. `digest` is the SHA-256 of its bytes in hexadecimal."""

    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object in a listing. `modified_at` is by the store's clock."""

    key: str
    modified_at: datetime


class ObjectStore:
    """Objects by key. Every method raises Unavailable while the store is away; writes fail closed.

    `guard` is awaited before each operation until it has returned once; it raises Unavailable. The entry point closes
    the store.
    """

    def __init__(self, store: Any, name: str, folder: Path | None) -> None:
        self.name = name  # for messages, without credentials
        self.guard: Callable[[], Awaitable[None]] | None = None
        self._store = store
        self._folder = folder
        self._threads = ThreadPoolExecutor(THREADS, "objects", initializer=lower_priority)
        self._stopping = weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)

    @classmethod
    def open(cls, url: str) -> Self:
        """Return the store of a URL, without a connection. Raises Unavailable where it cannot be opened."""
        folder, name = local_folder(url), redacted(url)
        try:
            if folder is not None:
                return cls(LocalStore(folder, mkdir=True), name, folder)
            return cls(from_url(url, client_options=_CLIENT, retry_config=_RETRIES), name, None)
        except (BaseError, OSError, ValueError) as exc:
            reason = str(exc).partition("\n")[0]
            raise Unavailable(f"the object store {name} cannot be opened: {reason}; check object_store_url") from exc

    async def rename_folder(self, deployment_id: str) -> Path:
        """Rename the local folder so that its objects stay, and begin an empty one. Return the renamed folder.

        Raises Unavailable where that fails.
        """
        folder = self._folder
        assert folder is not None, "only a local folder is renamed"
        kept = folder.with_name(f"{folder.name}-of-{deployment_id[:12]}")

        def rename() -> None:
            with _writing():
                folder.rename(kept)
                folder.mkdir(mode=0o700)

        await self.call(rename)
        return kept

    async def close(self) -> None:
        """Wait for the running operations. Idempotent."""
        await asyncio.to_thread(self._threads.shutdown)
        self._stopping.detach()

    def begin_object(self, key: str) -> ObjectWriter:
        """Return a writer of a new object, which replaces an object with this key once it is finished."""
        return ObjectWriter(self, key)

    async def read_range(self, key: str, start: int, num_bytes: int) -> bytes:
        """Return the bytes from `start` on, fewer only at the object's end.

        Raises ObjectMissing, also for an object that ends before `start`.
        """
        await self.check()
        return await self.call(lambda: bytes(obstore.get_range(self._store, key, start=start, length=num_bytes)))

    async def delete(self, key: str) -> bool:
        """Delete an object; return whether it was there, as far as the store reports it. Idempotent."""
        await self.check()
        return await self.call(lambda: self._delete(key))

    async def delete_some(self, prefix: str) -> int:
        """Delete some of the objects whose keys begin so; return their number, 0 where there is none."""
        empty: list[ListedObject] = []
        page = await anext(self.list_pages(prefix), empty)
        return await self.call(lambda: sum(self._delete(one.key) for one in page))

    async def list_pages(self, prefix: str) -> AsyncIterator[list[ListedObject]]:
        """Yield all objects whose keys begin so, some at a time."""
        await self.check()
        pages = await self.call(lambda: obstore.list(self._store, prefix, chunk_size=LISTED_AT_ONCE))
        while page := await self.call(lambda: next(pages, ())):
            yield [ListedObject(one["path"], one["last_modified"]) for one in page]

    async def create_mark(self, key: str, content: bytes) -> None:
        """Create an object unless there is one with this key. Needs no guard."""

        def create() -> None:
            with contextlib.suppress(AlreadyExistsError), _writing():
                obstore.put(self._store, key, content, mode="create")

        await self.call(create)

    async def read_mark(self, key: str) -> bytes | None:
        """Return a small object, None where there is none. Needs no guard."""
        with contextlib.suppress(ObjectMissing):
            return await self.call(lambda: bytes(obstore.get(self._store, key).bytes()))
        return None

    async def remove_unfinished(self, prefix: str = "", before: datetime | None = None) -> int:
        """Remove unfinished objects from a local folder, which killed processes leave; return their number.

        They are those whose keys begin with the prefix and that were not written since `before`. A bucket needs a
        lifecycle rule for that.
        """
        await self.check()
        if self._folder is None:
            return 0
        folder, before_s = self._folder / prefix, None if before is None else before.timestamp()
        return await self.call(lambda: _remove_unfinished(folder, before_s))

    async def check(self) -> None:
        """Ask the guard, unless it has agreed before. Raises Unavailable."""
        if self.guard is not None:
            await self.guard()
            self.guard = None

    async def call(self, function: Callable[[], T]) -> T:
        """Run a blocking function of obstore in a thread. Raises ObjectMissing, InsufficientStorage or Unavailable."""
        with _translated(self.name):
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def open_writer(self, key: str) -> Any:
        """Return obstore's writer of an object."""
        return obstore.open_writer(self._store, key, buffer_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def sync(self, key: str) -> None:
        """Force an object in a local folder, and its name, to the disk."""
        if self._folder is None:
            return
        for path in (self._folder / key, (self._folder / key).parent):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _delete(self, key: str) -> bool:
        try:
            obstore.delete(self._store, key)
        except FileNotFoundError:
            return False
        return True


class ObjectWriter:
    """One object that is being written: it exists once `finish` has returned. Owned by one task."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self.key = key
        self._store = store
        self._writer: Any = None
        self._digest = hashlib.sha256()
        self._is_finished = False
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises InsufficientStorage or Unavailable."""
        if self._writer is None:
            await self._store.check()
            self._writer = self._store.open_writer(self.key)
        writer = self._writer
        await self._store.call(lambda: self._write(writer, data))

    async def finish(self) -> WrittenObject:
        """Complete the object. Raises InsufficientStorage or Unavailable."""
        if self._writer is None:
            await self.write(b"")
        writer, self._writer = self._writer, None
        self._is_finished = True
        await self._store.call(lambda: self._finish(writer))
        return WrittenObject(self.num_bytes, self._digest.hexdigest())

    def abort(self) -> bool:
        """Give up an unfinished object; return whether it may be complete. Idempotent."""
        self._writer = None
        return self._is_finished

    def _write(self, writer: Any, data: bytes) -> None:
        with _writing():
            writer.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)

    def _finish(self, writer: Any) -> None:
        with _writing():
            writer.close()
            self._store.sync(self.key)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Let a write that finds nothing fail as such: there is no bucket, or no folder any more."""
    try:
        yield
    except FileNotFoundError as exc:
        raise BaseError(str(exc)) from exc


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    """Translate the errors of obstore and of the file system."""
    try:
        yield
    except FileNotFoundError as exc:
        raise ObjectMissing(str(exc).partition("\n")[0]) from exc
    except (BaseError, OSError, ValueError) as exc:
        reason = str(exc).partition("\n")[0]
        if _OUT_OF_RANGE.search(reason):
            raise ObjectMissing(reason) from exc
        log.warning(
            "object_store_failed",
            store=name,
            reason=reason,
            advice="check the object store and the permissions of its credentials",
        )
        if _NO_SPACE.search(str(exc)) or (isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT)):
            raise InsufficientStorage(
                "there is no space left for files; nothing was stored: try again later", code=FULL
            ) from exc
        raise Unavailable(
            "the object store is not available; try again shortly", code=UNAVAILABLE, retry_after_s=1
        ) from exc


def _remove_unfinished(folder: Path, before_s: float | None) -> int:
    num_removed = 0
    for path in folder.rglob("*#*"):
        with contextlib.suppress(FileNotFoundError):
            is_old = before_s is None or path.stat().st_mtime < before_s
            if is_old and _UNFINISHED.fullmatch(path.name) and path.is_file():
                path.unlink()
                num_removed += 1
    return num_removed
