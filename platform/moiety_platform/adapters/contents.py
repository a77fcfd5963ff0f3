"""Tensors of adapters: objects and, while an adapter is uploaded or has not moved yet, parts in SQL.

Parts come in requests of their own, to any gateway, and must follow each other without a gap, which one transaction per
part ensures; an adapter that is whole and checked becomes an object.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import structlog
from sqlalchemy import select, update

from moiety_platform.adapters.magnitudes import Magnitudes
from moiety_platform.adapters.models import Adapter, AdapterState
from moiety_platform.adapters.service import Now, erase_moved_parts, erase_some, get_adapter, lock_erasable, read_part
from moiety_platform.adapters.tensors import check_config, check_head, head_bytes
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, Conflict, NotFound
from moiety_platform.object_storage.keys import new_adapter_key
from moiety_platform.object_storage.store import PIECE_BYTES, ObjectMissing, ObjectStore, WrittenObject
from moiety_wire.messages import AdapterPart

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterContents:
    """Tensors of all adapters, for one gateway process; an adapter is never in memory as a whole.

    Methods raise Unavailable while a store is away.
    """

    database: Database
    objects: ObjectStore
    now: Now = now_ms
    incomplete: set[str] = field(default_factory=set)  # adapters in SQL that lack a part, and are not moved

    async def parts(self, adapter_id: str) -> AsyncIterator[AdapterPart]:
        """Yield the parts in the form that engines accept. Raises NotFound."""
        async with self.database.read() as session:
            adapter = await get_adapter(session, adapter_id)
        index = start = 0
        async for data in self._pieces(adapter):
            start += len(data)
            yield AdapterPart(adapter_id, index, data, "" if index else adapter.config, start >= adapter.num_bytes)
            index += 1

    async def store(self, adapter: Adapter) -> tuple[WrittenObject, str]:
        """Check a completed upload and write its object; return that and its key.

        Raises NotFound, Conflict, InsufficientStorage, or BadRequest where the bytes are not an adapter's tensors.
        """
        head, length, index = b"", 0, 0
        if not adapter.num_bytes:
            raise BadRequest("nothing was uploaded; send the parts of adapter_model.safetensors first")
        if adapter.state != AdapterState.UPLOADING:
            raise Conflict("The adapter is already complete; create another one.", code="adapter_changed")
        async for data in self._pieces(adapter):
            if not index:
                length = head_bytes(data)
            if len(head) < length:
                head += data[: length - len(head)]
            index += 1
        return await self._write(adapter, Magnitudes(check_head(head, adapter.num_bytes), length))

    async def move_some(self) -> int:
        """Move an earlier version's adapter from SQL to the object store, or erase some parts that are an object.

        Return the number of adapters or rows, 0 where nothing is left. After a kill at any point a call continues.
        """
        unmoved = Adapter.state == AdapterState.READY, Adapter.object_key.is_(None), Adapter.engine_adapter.is_(None)
        async with self.database.read() as session:
            wanted = select(Adapter).where(*unmoved, Adapter.id.not_in(self.incomplete)).limit(1)
            adapter = (await session.scalars(wanted)).first()
        if adapter is None:
            async with self.database.write() as session:
                return await erase_moved_parts(session)
        try:
            _, key = await self._write(adapter, None)
        except NotFound:
            log.exception(
                "adapter_content_incomplete",
                adapter_id=adapter.id,
                num_bytes=adapter.num_bytes,
                advice="upload the adapter again",
            )
            self.incomplete.add(adapter.id)
            return 1
        async with self.database.write() as session:
            changed = update(Adapter).where(Adapter.id == adapter.id, *unmoved).values(object_key=key)
            is_moved = await session.scalar(changed.returning(Adapter.id)) is not None
        if not is_moved:
            await self.discard(adapter.id, key)
        return 1

    async def purge(self) -> int:
        """Erase a part of an adapter that is deleted or abandoned; return the number of rows, 0 where there is none."""
        async with self.database.write() as session:
            adapter = await lock_erasable(session, self.now)
            if adapter is None:
                return 0
            if adapter.object_key is None:
                return await erase_some(session, adapter.id)
        await self.objects.delete(adapter.object_key)
        async with self.database.write() as session:
            return await erase_some(session, adapter.id)

    async def discard(self, adapter_id: str, key: str) -> None:
        """Delete an object of an adapter that has another one by now, or none any more."""
        async with self.database.read() as session:
            used = await session.scalar(select(Adapter.object_key).where(Adapter.id == adapter_id))
        if used != key:
            await self.objects.delete(key)

    async def _write(self, adapter: Adapter, magnitudes: Magnitudes | None) -> tuple[WrittenObject, str]:
        """Write the object of an adapter that is in SQL; check its values if requested, before it is complete."""
        key = new_adapter_key(adapter.tenant_id, adapter.id)
        writer = self.objects.begin_object(key)
        try:
            async for data in self._pieces(adapter):
                if magnitudes is not None:
                    await asyncio.to_thread(magnitudes.take, writer.num_bytes, data)
                await writer.write(data)
            if magnitudes is not None:
                magnitudes.check_gain(check_config(adapter.config))
            return await writer.finish(), key
        finally:
            writer.abort()

    async def _pieces(self, adapter: Adapter) -> AsyncIterator[bytes]:
        """Yield the tensors, from SQL until they have moved. Raises NotFound where a part is missing."""
        key, start = adapter.object_key, 0
        while start < adapter.num_bytes:
            data = b""
            if key is None:
                async with self.database.read() as session:
                    data = await read_part(session, adapter.id, start)
                    if not data:
                        key = await session.scalar(select(Adapter.object_key).where(Adapter.id == adapter.id))
            if key is not None:
                data = await self._read_object(key, start, adapter.num_bytes)
            if not data:
                raise _deleted()
            yield data
            start += len(data)

    async def _read_object(self, key: str, start: int, num_bytes: int) -> bytes:
        try:
            return await self.objects.read_range(key, start, min(PIECE_BYTES, num_bytes - start))
        except ObjectMissing as exc:
            raise _deleted() from exc


def _deleted() -> NotFound:
    return NotFound("the model's adapter was deleted meanwhile", code="model_not_found", param="model")
